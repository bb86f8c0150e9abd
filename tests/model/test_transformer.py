"""The whole forward pass: the fast kernels against the plain ones, causality, loss, dropout, windows."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from meshwright.kernels import attention, varlen
from meshwright.kernels.varlen import AttentionForm
from meshwright.model import Transformer
from tests.model.shrunk import KINDS, model, packed, tokens


@pytest.fixture(params=["blockwise", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways the fast attention may run on a CPU."""
    monkeypatch.setattr(attention, "prefers_blockwise", lambda *_: request.param == "blockwise")
    yield request.param


def loss_and_gradients(found: Transformer, *, rows: int = 2, length: int = 20, mask: bool = False) -> list[Tensor]:
    given = tokens(rows, length + 1)
    documents, positions = packed((7, 1, length - 8), rows) if mask else (None, None)
    loss = found.loss(given[:, :-1], given[:, 1:], documents=documents, positions=positions)
    total = loss.cross_entropy if loss.balance is None else loss.cross_entropy + loss.balance.sum()
    total.backward()
    return [total.detach(), *(p.grad for p in found.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mask", [False, True], ids=["plain", "packed"])
def test_fast_kernels_give_what_the_plain_ones_give(name: str, mask: bool, path: str) -> None:
    fast = loss_and_gradients(model(name), mask=mask)
    plain = loss_and_gradients(model(name, kernels="reference"), mask=mask)
    assert len(fast) == len(plain) == 1 + len(list(model(name).parameters()))
    for found, right in zip(fast, plain, strict=True):
        assert (found - right).norm() <= 2e-5 * right.norm() + 1e-6


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_models_stay_close_and_keep_their_dtype(name: str, dtype: torch.dtype) -> None:
    wide, narrow = model(name, louder=2.0), model(name, louder=2.0, dtype=dtype)
    given = tokens(2, 20)
    with torch.no_grad():
        found = narrow(given)
        assert found.dtype == dtype
        assert (found.float() - wide(given)).norm() < 0.05 * wide(given).norm()
    loss = narrow.loss(given[:, :-1], given[:, 1:]).cross_entropy
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(
        p.grad is not None and p.grad.dtype == dtype and torch.isfinite(p.grad).all() for p in narrow.parameters()
    )


@pytest.mark.parametrize("name", KINDS)
def test_no_token_sees_a_later_one(name: str) -> None:
    found = model(name)
    given = tokens(2, 20)
    with torch.no_grad():
        before = found(given)
        given[:, 12:] = (given[:, 12:] + 1) % found.shape.vocab
        after = found(given)
    torch.testing.assert_close(after[:, :12], before[:, :12], rtol=1e-5, atol=1e-5)
    assert (after[:, 12:] - before[:, 12:]).abs().amax(-1).min() > 1e-3, "and every later one changes"


@pytest.mark.parametrize("name", ["llama-2-7b", "deepseek-v3", "gpt2-124m"])
def test_every_token_of_the_past_matters(name: str) -> None:
    found = model(name)
    given = tokens(1, 12)
    with torch.no_grad():
        before = found(given)[0, -1]
        for place in range(12):
            other = given.clone()
            other[0, place] = (other[0, place] + 1) % found.shape.vocab
            assert (found(other)[0, -1] - before).abs().max() > 1e-4, place


def test_a_window_limits_how_far_a_layer_looks() -> None:
    """Three layers of window 5 reach 3 x 4 tokens back and not one more; without a window everything is reached."""
    found = model("mistral-7b-v0.1")
    assert found.shape.window == 5 and found.shape.layers == 3
    given = tokens(1, 30)
    with torch.no_grad():
        before = found(given)[0, -1]
        changed = []
        for place in range(30):
            other = given.clone()
            other[0, place] = (other[0, place] + 1) % found.shape.vocab
            changed.append((found(other)[0, -1] - before).abs().max().item() > 1e-6)
    assert changed == [place >= 29 - 12 for place in range(30)]


def test_loss_is_the_sum_over_valid_targets_of_the_logits() -> None:
    found = model("llama-3.1-8b")
    given = tokens(2, 21)
    targets = given[:, 1:].clone()
    targets[0, 3:9] = -100
    with torch.no_grad():
        logs = found(given[:, :-1]).log_softmax(-1)
        loss = found.loss(given[:, :-1], targets)
        scaled = found.loss(given[:, :-1], targets, scale=torch.tensor(0.25))
    chosen = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(loss.cross_entropy, -chosen[targets >= 0].sum())
    torch.testing.assert_close(scaled.cross_entropy, loss.cross_entropy / 4)
    assert loss.balance is None


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-3.1-8b", "mixtral-8x7b", "deepseek-v3"])
def test_dropout_is_there_in_training_and_gone_in_evaluation(name: str) -> None:
    found, plain = model(name, dropout=0.3), model(name)
    given = tokens(2, 20)
    with torch.no_grad():
        found.train()
        torch.manual_seed(0)
        first = found(given)
        assert not torch.allclose(first, found(given), atol=1e-3), "another draw"
        torch.manual_seed(0)
        assert torch.equal(first, found(given)), "the same draw"
        found.eval()
        assert torch.equal(found(given), plain(given))


def test_dropout_reaches_embedding_attention_and_both_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    found = model("gpt2-124m", dropout=0.3)
    drawn: list[tuple[int, ...]] = []
    real = torch.native_dropout

    def spy(x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
        assert p == 0.3 and train
        drawn.append(tuple(x.shape))
        return real(x, p, train)

    monkeypatch.setattr(torch, "native_dropout", spy)
    weights: list[float] = []
    attend = varlen.attend

    def watch(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        weights.append(form.dropout)
        return attend(q, k, v, form)

    monkeypatch.setattr(varlen, "attend", watch)
    found(tokens(2, 10))
    assert drawn == [(2, 10, 24)] * (1 + 2 * 3) and weights == [0.3] * 3


def test_a_tied_head_is_the_embedding() -> None:
    found = model("qwen2.5-0.5b")
    assert found.shape.tied and found.head_weight is found.embed.weight
    assert not any(name.startswith("head") for name, _ in found.named_parameters())
    loss = found.loss(tokens(1, 5), tokens(1, 5, seed=1)).cross_entropy
    loss.backward()
    unused = sorted(set(range(found.shape.vocab)) - set(tokens(1, 5).flatten().tolist()))
    assert found.embed.weight.grad is not None and found.embed.weight.grad[unused].abs().min() > 0


def test_rows_do_not_see_each_other() -> None:
    found = model("llama-3.1-8b")
    given = tokens(3, 20)
    with torch.no_grad():
        together = found(given)
        for row in range(3):
            torch.testing.assert_close(found(given[row : row + 1])[0], together[row], rtol=1e-5, atol=1e-5)
