"""One optimizer step: no split into micro-batches changes it, clipping, skipping, the loss it reports."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from meshwright.kernels.optimizer.adamw import euclidean_norm
from meshwright.parallel import on_one_device
from meshwright.training.optimizer.precision import LossScaler
from meshwright.training.step.batches import split
from meshwright.training.step.step import train_step
from tests.training.tiny import RECIPE, Watched, batch, relative, small, trained, weights


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gpt2-124m"])
@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    valid=st.lists(st.integers(0, 12), min_size=8, max_size=8).filter(any),
    borders=st.booleans(),
    seed=st.integers(0, 9),
)
@pytest.mark.long
def test_accumulation_changes_nothing(name: str, valid: list[int], borders: bool, seed: int) -> None:
    """1 x 8, 2 x 4, 8 x 1 sequences with unequal numbers of valid tokens: loss, gradients, new weights to 1e-6."""
    whole = batch(8, 12, valid=valid, seed=seed, borders=borders)
    whole_model = small(name)
    right, optimizer = trained(whole_model, whole, 8, rate=1e-3)
    for size in (4, 1):
        other = small(name)
        outcome, watched = trained(other, whole, size, rate=1e-3)
        assert outcome.loss.item() == pytest.approx(right.loss.item(), rel=1e-6)
        assert outcome.grad_norm.item() == pytest.approx(right.grad_norm.item(), rel=1e-6)
        assert (outcome.balance is None) == (right.balance is None)
        if outcome.balance is not None and right.balance is not None:
            assert outcome.balance.item() == pytest.approx(right.balance.item(), rel=1e-6)
        scale = max(value.norm().item() for value in optimizer.seen.values())
        for key, value in optimizer.seen.items():
            assert (watched.seen[key] - value).norm() <= 1e-6 * max(value.norm().item(), 0.1 * scale), key
        for key, value in weights(whole_model).items():
            assert relative(weights(other)[key], value) < 1e-6, key


def test_the_loss_is_the_mean_over_valid_tokens_of_all_micro_batches() -> None:
    whole = batch(4, 10, valid=[10, 1, 0, 6])
    model = small()
    with torch.no_grad():
        logs = model(whole.tokens).log_softmax(-1)
    chosen = logs.gather(-1, whole.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected = -chosen[whole.targets >= 0].mean().item()
    result, _ = trained(model, whole, 1)
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    assert [part.valid for part in split(whole, 1)] == [10, 1, 0, 6]


def test_a_step_without_any_valid_token_changes_only_by_decay() -> None:
    model = small()
    before = weights(model)
    result, _ = trained(model, batch(2, 6, valid=[0, 0]), 1)
    assert result.loss == 0 and result.grad_norm == 0 and result.skipped == 0
    for key, value in weights(model).items():
        expected = before[key] * (1 - 1e-2 * RECIPE.weight_decay) if value.dim() > 1 else before[key]
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


def test_the_balance_loss_is_weighed_and_reported_bare() -> None:
    whole = batch(4, 10)
    reference = small("mixtral-8x7b")
    balance = reference.loss(whole.tokens, whole.targets).balance
    assert balance is not None
    light, without = (trained(small("mixtral-8x7b"), whole, 2, balance_loss=weight) for weight in (0.5, 0.0))
    assert light[0].balance is not None and light[0].balance.item() == pytest.approx(balance.mean().item(), rel=1e-5)
    assert light[0].loss.item() == pytest.approx(without[0].loss.item(), rel=1e-6), "the loss itself leaves it out"
    model = small("mixtral-8x7b")
    mean = model.loss(whole.tokens, whole.targets).balance
    assert mean is not None
    (mean.mean() * 0.5).backward()
    router = "layers.1.mlp.router.weight"
    grad = model.get_parameter(router).grad
    assert grad is not None
    unclipped = [trained(small("mixtral-8x7b"), whole, 2, balance_loss=w, clip=0.0)[1].seen[router] for w in (0.5, 0.0)]
    assert relative(unclipped[0] - unclipped[1], grad) < 1e-4


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e9])
def test_clipping(clip: float) -> None:
    """The norm is reported as it was; the update sees it no longer than `clip`; 0 = as it is."""
    whole = batch(4, 10)
    result, optimizer = trained(small(), whole, 4, clip=clip)
    _, free = trained(small(), whole, 4, clip=0.0)
    length = math.sqrt(sum(value.square().sum().item() for value in optimizer.seen.values()))
    whole_length = math.sqrt(sum(value.square().sum().item() for value in free.seen.values()))
    assert result.grad_norm.item() == pytest.approx(whole_length, rel=1e-6)
    assert length == pytest.approx(min(whole_length, clip or math.inf), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_is_no_number_leaves_every_bit(dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    optimizer = Watched(model.named_parameters(), RECIPE)
    batches = [batch(4, 10)]
    options = {"rate": 1e-2, "clip": 1.0, "balance_loss": 0.0}
    train_step(on_one_device(model), optimizer, batches, **options)
    poisoned = "layers.1.attention.o.weight"
    with torch.no_grad():
        model.get_parameter(poisoned)[0, 0] = torch.nan
        optimizer.masters[poisoned][0, 0] = torch.nan
    before = {name: tensor.clone() for name, tensor in {**model.state_dict(), **optimizer.tensors()}.items()}
    result = train_step(on_one_device(model), optimizer, batches, **options)
    assert result.skipped == 1 and not torch.isfinite(result.grad_norm) and not torch.isfinite(result.loss)
    for name, tensor in {**model.state_dict(), **optimizer.tensors()}.items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0)), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_fp16_is_scaled_and_the_scale_leaves_no_trace() -> None:
    """Loss and norm are those of the unscaled step, and the weights move alike whatever the scale."""
    whole = batch(4, 10)
    plain, _ = trained(small(), whole, 2)
    moved = []
    for scale in (2.0**8, 2.0**12):
        model = small(dtype=torch.float16)
        scaler = LossScaler(torch.device("cpu"), initial=scale)
        result, optimizer = trained(model, whole, 2, scaler=scaler)
        assert result.skipped == 0 and scaler.scale == scale and scaler.good_steps == 1
        assert result.loss.item() == pytest.approx(plain.loss.item(), rel=5e-3)
        assert result.grad_norm.item() == pytest.approx(plain.grad_norm.item(), rel=2e-2)
        moved.append(optimizer.seen)
    for key, value in moved[0].items():
        assert relative(moved[1][key], value) < 2e-2, key


def test_an_fp16_overflow_skips_the_step_halves_the_scale_and_the_next_one_goes_on() -> None:
    model = small(dtype=torch.float16)
    optimizer = Watched(model.named_parameters(), RECIPE)
    scaler = LossScaler(torch.device("cpu"), initial=2.0**30)
    options = {"rate": 1e-2, "clip": 1.0, "balance_loss": 0.0, "scaler": scaler}
    before, skipped = weights(model), 0
    while True:
        result = train_step(on_one_device(model), optimizer, [batch(4, 10)], **options)
        if not result.skipped:
            break
        skipped += 1
        assert math.isfinite(result.loss.item()), "the loss itself does not overflow"
        assert scaler.scale == 2.0 ** (30 - skipped) and scaler.good_steps == 0
        assert all(torch.equal(value, before[key]) for key, value in weights(model).items())
    assert 3 < skipped < 30 and scaler.good_steps == 1
    assert any(not torch.equal(value, before[key]) for key, value in weights(model).items())


@pytest.mark.parametrize(("initial", "interval", "after"), [(2.0**40, 2000, 0.5), (2.0**8, 1, 2.0)])
def test_the_loss_of_an_fp16_step_that_changes_the_scale_is_that_of_the_step(
    initial: float, interval: int, after: float
) -> None:
    """An overflow halves the scale and a growth step doubles it; the loss was scaled by what it was before."""
    whole = batch(4, 10)
    logits = small(dtype=torch.float16)(whole.tokens).float()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole.targets.flatten()).item()
    scaler = LossScaler(torch.device("cpu"), initial=initial, growth_interval=interval)
    result, _ = trained(small(dtype=torch.float16), whole, 2, scaler=scaler)
    assert scaler.scale.item() == initial * after and result.skipped.item() == (after < 1)
    assert result.loss.item() == pytest.approx(expected, rel=5e-3)


def test_measuring_noise_changes_no_bit_and_gives_each_micro_batchs_mean_gradient() -> None:
    whole = batch(4, 10, valid=[10, 3, 7, 1])
    plain, measured = small("mixtral-8x7b"), small("mixtral-8x7b")
    result, _ = trained(plain, whole, 1, balance_loss=0.0)
    noisy, _ = trained(measured, whole, 1, balance_loss=0.0, measure_noise=True)
    assert result.micro_squared == () and noisy.micro_tokens == (10, 3, 7, 1)
    for key, value in weights(plain).items():
        assert torch.equal(weights(measured)[key], value), key
    assert torch.equal(result.loss, noisy.loss) and torch.equal(result.grad_norm, noisy.grad_norm)
    for part, squared in zip(split(whole, 1), noisy.micro_squared, strict=True):
        alone = small("mixtral-8x7b")
        (alone.loss(part.tokens, part.targets).cross_entropy / part.valid).backward()
        expected = euclidean_norm([p.grad for p in alone.parameters() if p.grad is not None]) ** 2
        assert squared.item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_norm_is_taken_in_fp32_whatever_the_dtype() -> None:
    """65504 is the largest fp16, and the squares of these gradients are far above it."""
    parts = [torch.full((1000,), 300.0, dtype=torch.float16), torch.full((10,), -4.0, dtype=torch.float32)]
    assert euclidean_norm(parts).item() == pytest.approx(math.sqrt(1000 * 300.0**2 + 160), rel=1e-6)
    assert euclidean_norm(parts).dtype == torch.float32


def test_dropout_is_drawn_anew_in_each_micro_batch() -> None:
    whole = batch(2, 10)
    twice = type(whole)(tokens=whole.tokens[:1].expand(2, -1), targets=whole.targets[:1].expand(2, -1), valid=20)
    model = small(dropout=0.5)
    torch.manual_seed(0)
    result, _ = trained(model, twice, 1, measure_noise=True)
    first, second = result.micro_squared
    assert first != second
