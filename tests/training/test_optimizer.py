"""AdamW: against torch's own, master weights against an explicit fp32 copy, decay, bytes, state."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from meshwright.compat import fake_tensors
from meshwright.kernels.optimizer.adamw import euclidean_norm
from meshwright.model import Transformer
from meshwright.spec import num_parameters
from meshwright.training.optimizer import optimizer as module
from meshwright.training.optimizer.optimizer import Optimizer
from tests.training.tiny import RECIPE, relative, small, weights

ONE, ZERO = torch.ones(()), torch.zeros(())
RECIPES = (RECIPE, replace(RECIPE, beta1=0.8, beta2=0.99, epsilon=1e-8, weight_decay=0.0))


def noise(model: Transformer, step: int, size: float = 1.0) -> dict[str, Tensor]:
    """Gradients of every parameter, drawn anew for each step."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: (torch.randn(parameter.shape, generator=generator) * size).to(parameter.dtype)
        for name, parameter in model.named_parameters()
    }


def give(model: Transformer, gradients: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()


def groups(named: dict[str, nn.Parameter], decay: float) -> list[dict[str, object]]:
    matrices = [parameter for parameter in named.values() if parameter.dim() > 1]
    vectors = [parameter for parameter in named.values() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("clip", [1e9, 1.0])
def test_fp32_equals_torchs_adamw_after_clip_grad_norm(recipe: object, clip: float) -> None:
    ours, theirs = small("gpt2-124m"), small("gpt2-124m")
    mine = Optimizer(ours.named_parameters(), recipe)  # type: ignore[arg-type]
    usual = torch.optim.AdamW(
        groups(dict(theirs.named_parameters()), recipe.weight_decay),  # type: ignore[attr-defined]
        betas=(recipe.beta1, recipe.beta2), eps=recipe.epsilon,  # type: ignore[attr-defined]
    )  # fmt: skip
    for step in range(6):
        rate = 1e-2 / (1 + step)
        for model in (ours, theirs):
            give(model, noise(model, step, size=0.01 * (1 + step % 3)))
        norm = euclidean_norm([p.grad for p in ours.parameters() if p.grad is not None])
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip, foreach=False))
        mine.step(rate, divide_by=1 / (clip / (norm + 1e-6)).clamp(max=1.0), skip=ZERO)
        for group in usual.param_groups:
            group["lr"] = rate
        usual.step()
    for name, value in weights(ours).items():
        assert relative(value, theirs.get_parameter(name)) < 2e-7, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_master_weights_equal_an_explicit_fp32_copy(dtype: torch.dtype) -> None:
    """Gradients of the narrow weights move the fp32 ones; the narrow ones are those rounded, bit for bit."""
    model = small(dtype=dtype)
    mine = Optimizer(model.named_parameters(), RECIPE)
    copies = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    usual = torch.optim.AdamW(groups(copies, 0.1), betas=(0.9, 0.9), eps=RECIPE.epsilon, lr=1e-3, fused=True)
    for step in range(6):
        gradients = noise(model, step)
        give(model, gradients)
        mine.step(1e-3, divide_by=torch.tensor(4.0), skip=ZERO)
        for name, copy in copies.items():
            copy.grad = gradients[name].float() / 4
        usual.step()
        for name, copy in copies.items():
            assert torch.equal(mine.masters[name], copy.detach()), name
            assert torch.equal(model.get_parameter(name), copy.detach().to(dtype)), name


def test_steps_smaller_than_the_weights_rounding_add_up() -> None:
    """What master weights are for: without them such a step would be lost every time."""
    model = small(dtype=torch.bfloat16)
    mine = Optimizer(model.named_parameters(), replace(RECIPE, weight_decay=0.0))
    before = weights(model)["norm.weight"].clone()
    for step in range(100):
        give(model, {name: torch.ones_like(p) for name, p in model.named_parameters()})
        mine.step(1e-4, divide_by=ONE, skip=ZERO)
        if step == 0:
            assert torch.equal(model.norm.weight, before), "one step is below half a unit of the last place"
    moved = before.float() - model.norm.weight.detach().float()
    assert ((moved - 0.01).abs() < 0.005).all()


BYTES = {torch.float32: (4, 4, 0, 4, 4), torch.bfloat16: (2, 2, 4, 4, 4), torch.float16: (2, 2, 4, 4, 4)}
"""A parameter's weight, gradient, master weight and two moments."""


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_bytes_a_parameter_over_the_tensors_that_are_there(dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    mine = Optimizer(model.named_parameters(), RECIPE)
    give(model, noise(model, 0))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    mine.step(1e-3, divide_by=ONE, skip=ZERO)
    state = mine.tensors()
    parts = [
        list(model.parameters()),
        gradients,
        *(
            [value for name, value in state.items() if name.startswith(part)]
            for part in ("master.", "moment1.", "moment2.")
        ),
    ]
    storages = {tensor.untyped_storage().data_ptr(): tensor for part in parts for tensor in part}
    assert len(storages) == sum(len(part) for part in parts), "no tensor is counted twice"
    found_bytes = tuple(sum(tensor.untyped_storage().nbytes() for tensor in part) for part in parts)
    assert tuple(part / num_parameters(model.shape) for part in found_bytes) == BYTES[dtype]
    assert not any(master.grad is not None for name, master in mine.masters.items() if dtype != torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gpt2-124m", "qwen3-30b-a3b", "deepseek-v3"])
def test_only_matrices_decay(name: str, dtype: torch.dtype) -> None:
    """With gradients of zero a step is the decay alone."""
    model = small(name, dtype=dtype)
    mine = Optimizer(model.named_parameters(), RECIPE)
    before = {key: value.clone() for key, value in mine.masters.items()}
    give(model, {key: torch.zeros_like(p) for key, p in model.named_parameters()})
    mine.step(0.5, divide_by=ONE, skip=ZERO)
    vectors = 0
    for key, value in mine.masters.items():
        if "norm" in key or key.endswith("bias"):
            assert torch.equal(value, before[key]), key
            vectors += 1
        else:
            torch.testing.assert_close(value.detach(), before[key] * (1 - 0.5 * 0.1), rtol=1e-6, atol=0)
    assert vectors == sum(p.dim() == 1 for p in model.parameters()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_skipped_step_leaves_every_bit_and_counts_as_none(dtype: torch.dtype) -> None:
    model = small(dtype=dtype)
    mine = Optimizer(model.named_parameters(), RECIPE)
    give(model, noise(model, 0))
    mine.step(1e-3, divide_by=ONE, skip=ZERO)
    before = {name: tensor.clone() for name, tensor in {**mine.tensors(), **weights(model)}.items()}
    broken = noise(model, 1)
    broken["norm.weight"][0] = torch.inf
    give(model, broken)
    mine.step(1e-3, divide_by=ONE, skip=ONE)
    for name, tensor in {**mine.tensors(), **weights(model)}.items():
        assert torch.equal(tensor, before[name]), name
    assert before["step.norm.weight"] == 1


def test_buckets_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little is widened at once: here about one parameter at first, then all together."""
    moved = []
    for size in (1, 6000, 2**26):
        monkeypatch.setattr(module, "BUCKET_BYTES", size)
        model = small(dtype=torch.bfloat16)
        mine = Optimizer(model.named_parameters(), RECIPE)
        for step in range(3):
            give(model, noise(model, step))
            buckets = list(mine.buckets())
            mine.step(1e-3, divide_by=ONE, skip=ZERO)
        assert sorted(name for names in buckets for name in names) == sorted(dict(model.named_parameters()))
        moved.append((len(buckets), model))
    counts = [count for count, _ in moved]
    assert counts[0] > counts[1] > counts[2] == 1
    for _, model in moved[1:]:
        for name, value in weights(moved[0][1]).items():
            assert torch.equal(model.get_parameter(name), value), name


def linears(sizes: list[int], dtype: torch.dtype = torch.bfloat16) -> nn.ParameterDict:
    return nn.ParameterDict({f"{at:02}": nn.Parameter(torch.zeros(n, dtype=dtype)) for at, n in enumerate(sizes)})


def test_gradients_in_fp32_are_one_bucket_however_many_they_are() -> None:
    model = linears([2**20] * 40 + [8] * 40)
    mine = Optimizer(model.items(), RECIPE)
    for parameter in model.values():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    assert list(mine.buckets()) == [tuple(model)]


@pytest.mark.parametrize("shared", [False, True], ids=["own memory", "pieces of a buffer"])
def test_widening_takes_one_bucket_at_most(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """Replayed from sizes alone: 16-bit gradients that are there, fp32 ones made of them. What was dropped makes room
    for the next bucket, but where all are pieces of one buffer, which stays."""
    monkeypatch.setattr(module, "BUCKET_BYTES", 4096)
    sizes = [8, 100, 100, 300, 1000, 1000, 1500, 2000, 5000, 5000, 5000, 20_000]
    model = linears(sizes)
    mine = Optimizer(model.items(), RECIPE)
    buffer = torch.zeros(sum(sizes), dtype=torch.bfloat16).split(sizes)
    for parameter, piece in zip(model.values(), buffer, strict=True):
        parameter.grad = piece if shared else piece.clone()
    at_first, there = 2 * sum(sizes), 2 * sum(sizes)
    buckets = list(mine.buckets())
    for names in buckets:
        numbers = [sizes[int(name)] for name in names]
        there -= 0 if shared else 2 * sum(numbers)
        assert len(names) == 1 or there + 4 * sum(numbers) <= at_first + (4096 if shared else 2048)
    assert len(buckets) == (9 if shared else 7)


def test_each_bucket_is_dropped_before_the_next_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", 1)
    model = linears([64, 128, 256])
    mine = Optimizer(model.items(), RECIPE)
    alive: list[int] = []
    widened: list[weakref.ref[Tensor]] = []
    real = Optimizer._widen_gradients

    def watched(self: Optimizer, names: tuple[str, ...]) -> dict[str, Tensor]:
        alive.append(sum(reference() is not None for reference in widened))
        made = real(self, names)
        widened.extend(weakref.ref(value) for value in made.values())
        return made

    monkeypatch.setattr(Optimizer, "_widen_gradients", watched)
    for parameter in model.values():
        parameter.grad = torch.ones_like(parameter)
    mine.step(1e-3, divide_by=ONE, skip=ZERO)
    assert alive == [0, 0, 0] and len(widened) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_goes_on_from_where_it_was_copied(dtype: torch.dtype) -> None:
    """Written in place into a fresh optimizer, as a checkpoint is."""
    ours, later = small(dtype=dtype), small(dtype=dtype, seed=1)
    mine, other = Optimizer(ours.named_parameters(), RECIPE), Optimizer(later.named_parameters(), RECIPE)
    for step in range(5):
        give(ours, noise(ours, step))
        mine.step(1e-3, divide_by=ONE, skip=ZERO)
        if step == 2:
            state = {name: tensor.clone() for name, tensor in {**mine.tensors(), **weights(ours)}.items()}
    with torch.no_grad():
        for name, tensor in {**other.tensors(), **dict(later.named_parameters())}.items():
            tensor.copy_(state[name])
    for step in (3, 4):
        give(later, noise(later, step))
        other.step(1e-3, divide_by=ONE, skip=ZERO)
    assert mine.tensors().keys() == other.tensors().keys()
    for name, tensor in {**mine.tensors(), **weights(ours)}.items():
        assert torch.equal(tensor, {**other.tensors(), **weights(later)}[name]), name


def test_the_names_of_the_state() -> None:
    kinds = ("moment1.", "moment2.", "step.")
    for dtype, expected in ((torch.float32, kinds), (torch.bfloat16, ("master.", *kinds))):
        model = small(dtype=dtype)
        state = Optimizer(model.named_parameters(), RECIPE).tensors()
        assert set(state) == {kind + name for kind in expected for name in dict(model.named_parameters())}
        assert all(tensor.dtype == torch.float32 for tensor in state.values())
        assert not any(tensor.any() for name, tensor in state.items() if not name.startswith("master."))


def test_masters_are_read_anew_after_weights_were_loaded() -> None:
    model = small(dtype=torch.bfloat16)
    mine = Optimizer(model.named_parameters(), RECIPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    mine.read_masters()
    for name, parameter in model.named_parameters():
        assert torch.equal(mine.masters[name], parameter.detach().float())
    fp32 = small()
    same = Optimizer(fp32.named_parameters(), RECIPE)
    same.read_masters()
    assert all(same.masters[name].data_ptr() == p.data_ptr() for name, p in fp32.named_parameters())


def test_a_parameter_without_gradient_stays() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = small(dtype=dtype)
        mine = Optimizer(model.named_parameters(), RECIPE)
        give(model, noise(model, 0))
        model.head.weight.grad = None
        before = weights(model)
        mine.step(1e-2, divide_by=ONE, skip=ZERO)
        assert torch.equal(model.head.weight, before["head.weight"])
        assert not torch.equal(model.embed.weight, before["embed.weight"])
        mine.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_needs_no_values(dtype: torch.dtype) -> None:
    """The dry run makes it on tensors that have none; what reads one there waits for the device on a GPU."""
    with fake_tensors():
        named = {str(at): nn.Parameter(torch.zeros((4, at)[:at], dtype=dtype)) for at in (1, 2)}
        mine = Optimizer(named.items(), RECIPE)
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        norm = euclidean_norm([p.grad for p in named.values() if p.grad is not None])
        mine.step(1e-3, divide_by=norm, skip=torch.zeros(()))
