"""The whole forward pass: the fast kernels against the plain ones, causality, loss, dropout, windows."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from meshwright.kernels.attention import attend as attention
from meshwright.kernels.attention import varlen
from meshwright.kernels.attention.varlen import AttentionForm
from meshwright.model import Transformer
from meshwright.model import transformer as transformer_module
from tests.model.shrunk import KINDS, model, packed, tokens


@pytest.fixture(params=["blockwise", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways the fast attention may run on a CPU."""
    monkeypatch.setattr(attention, "prefers_blockwise", lambda *_: request.param == "blockwise")
    yield request.param


def loss_and_gradients(
    transformer: Transformer, *, rows: int = 2, length: int = 20, mask: bool = False
) -> list[Tensor]:
    ids = tokens(rows, length + 1)
    documents, positions = packed((7, 1, length - 8), rows) if mask else (None, None)
    loss = transformer.loss(ids[:, :-1], ids[:, 1:], documents=documents, positions=positions)
    total = loss.cross_entropy if loss.balance is None else loss.cross_entropy + loss.balance.sum()
    total.backward()
    return [total.detach(), *(p.grad for p in transformer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mask", [False, True], ids=["plain", "packed"])
def test_fast_kernels_give_what_the_plain_ones_give(name: str, mask: bool, path: str) -> None:
    fast = loss_and_gradients(model(name), mask=mask)
    plain = loss_and_gradients(model(name, kernels="reference"), mask=mask)
    assert len(fast) == len(plain) == 1 + len(list(model(name).parameters()))
    for fast_values, right in zip(fast, plain, strict=True):
        assert (fast_values - right).norm() <= 2e-5 * right.norm() + 1e-6


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_models_stay_close_and_keep_their_dtype(name: str, dtype: torch.dtype) -> None:
    wide, narrow = model(name, louder=2.0), model(name, louder=2.0, dtype=dtype)
    ids = tokens(2, 20)
    with torch.no_grad():
        logits = narrow(ids)
        assert logits.dtype == dtype
        assert (logits.float() - wide(ids)).norm() < 0.05 * wide(ids).norm()
    loss = narrow.loss(ids[:, :-1], ids[:, 1:]).cross_entropy
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(
        p.grad is not None and p.grad.dtype == dtype and torch.isfinite(p.grad).all() for p in narrow.parameters()
    )


@pytest.mark.parametrize("name", KINDS)
def test_no_token_sees_a_later_one(name: str) -> None:
    transformer = model(name)
    ids = tokens(2, 20)
    with torch.no_grad():
        before = transformer(ids)
        ids[:, 12:] = (ids[:, 12:] + 1) % transformer.shape.vocab
        after = transformer(ids)
    torch.testing.assert_close(after[:, :12], before[:, :12], rtol=1e-5, atol=1e-5)
    assert (after[:, 12:] - before[:, 12:]).abs().amax(-1).min() > 1e-3, "and every later one changes"


@pytest.mark.parametrize("name", ["llama-2-7b", "deepseek-v3", "gpt2-124m"])
def test_every_token_of_the_past_matters(name: str) -> None:
    transformer = model(name)
    ids = tokens(1, 12)
    with torch.no_grad():
        before = transformer(ids)[0, -1]
        for position in range(12):
            other = ids.clone()
            other[0, position] = (other[0, position] + 1) % transformer.shape.vocab
            assert (transformer(other)[0, -1] - before).abs().max() > 1e-4, position


def test_a_window_limits_how_far_a_layer_looks() -> None:
    """Three layers of window 5 reach 3 x 4 tokens back and not one more; without a window everything is reached."""
    transformer = model("mistral-7b-v0.1")
    assert transformer.shape.window == 5 and transformer.shape.layers == 3
    ids = tokens(1, 30)
    with torch.no_grad():
        before = transformer(ids)[0, -1]
        changed = []
        for position in range(30):
            other = ids.clone()
            other[0, position] = (other[0, position] + 1) % transformer.shape.vocab
            changed.append((transformer(other)[0, -1] - before).abs().max().item() > 1e-6)
    assert changed == [position >= 29 - 12 for position in range(30)]


def test_loss_is_the_sum_over_valid_targets_of_the_logits() -> None:
    transformer = model("llama-3.1-8b")
    ids = tokens(2, 21)
    targets = ids[:, 1:].clone()
    targets[0, 3:9] = -100
    with torch.no_grad():
        logs = transformer(ids[:, :-1]).log_softmax(-1)
        loss = transformer.loss(ids[:, :-1], targets)
        scaled = transformer.loss(ids[:, :-1], targets, scale=torch.tensor(0.25))
    chosen = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(loss.cross_entropy, -chosen[targets >= 0].sum())
    torch.testing.assert_close(scaled.cross_entropy, loss.cross_entropy / 4)
    assert loss.balance is None


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-3.1-8b", "mixtral-8x7b", "deepseek-v3"])
def test_dropout_is_there_in_training_and_gone_in_evaluation(name: str) -> None:
    transformer, plain = model(name, dropout=0.3), model(name)
    ids = tokens(2, 20)
    with torch.no_grad():
        transformer.train()
        torch.manual_seed(0)
        first = transformer(ids)
        assert not torch.allclose(first, transformer(ids), atol=1e-3), "another draw"
        torch.manual_seed(0)
        assert torch.equal(first, transformer(ids)), "the same draw"
        transformer.eval()
        assert torch.equal(transformer(ids), plain(ids))


def test_dropout_reaches_embedding_attention_and_both_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = model("gpt2-124m", dropout=0.3)
    drawn: list[tuple[int, ...]] = []
    real = transformer_module.dropout

    def spy(x: Tensor, rate: float, rows: Tensor, site: int) -> Tensor:
        assert rate == 0.3 and rows.shape == x.shape[:2]
        drawn.append(tuple(x.shape))
        return real(x, rate, rows, site)

    monkeypatch.setattr(transformer_module, "dropout", spy)
    weights: list[float] = []
    attend = varlen.attend

    def watch(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        weights.append(form.rate)
        return attend(q, k, v, form)

    monkeypatch.setattr(varlen, "attend", watch)
    transformer(tokens(2, 10))
    assert drawn == [(2, 10, 24)] * (1 + 2 * 3) and weights == [0.3] * 3


def test_a_tied_head_is_the_embedding() -> None:
    transformer = model("qwen2.5-0.5b")
    assert transformer.shape.tied and transformer.head_weight is transformer.embed.weight
    assert not any(name.startswith("head") for name, _ in transformer.named_parameters())
    loss = transformer.loss(tokens(1, 5), tokens(1, 5, seed=1)).cross_entropy
    loss.backward()
    unused = sorted(set(range(transformer.shape.vocab)) - set(tokens(1, 5).flatten().tolist()))
    assert transformer.embed.weight.grad is not None and transformer.embed.weight.grad[unused].abs().min() > 0


def test_rows_do_not_see_each_other() -> None:
    transformer = model("llama-3.1-8b")
    ids = tokens(3, 20)
    with torch.no_grad():
        together = transformer(ids)
        for row in range(3):
            torch.testing.assert_close(transformer(ids[row : row + 1])[0], together[row], rtol=1e-5, atol=1e-5)
