"""Packed documents: each is as if it were alone, and none learns of another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.shrunk import DENSE, KINDS, VOCAB, model, packed, tokens

lengths_of_documents = st.lists(st.integers(1, 9), min_size=2, max_size=5)
few = settings(max_examples=12, deadline=None, derandomize=True)
MODELS = {name: model(name).eval() for name in KINDS}


@pytest.mark.parametrize("name", (*DENSE, "deepseek-v3"))
@few
@given(lengths=lengths_of_documents, data=st.data())
def test_changing_one_document_changes_nothing_in_another(name: str, lengths: list[int], data: st.DataObject) -> None:
    """Logits of other documents stay equal to the bit, except where experts multiply other rows together."""
    chosen = data.draw(st.integers(0, len(lengths) - 1))
    documents, positions = packed(lengths, rows=2)
    transformer, inside = MODELS[name], documents[0] == chosen
    before = tokens(2, sum(lengths), seed=data.draw(st.integers(0, 99)))
    after = before.clone()
    after[:, inside] = (after[:, inside] + 1) % VOCAB
    with torch.no_grad():
        first = transformer(before, documents=documents, positions=positions)
        second = transformer(after, documents=documents, positions=positions)
    if transformer.shape.moe:
        torch.testing.assert_close(first[:, ~inside], second[:, ~inside], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(first[:, ~inside], second[:, ~inside])
    assert not torch.allclose(first[:, inside], second[:, inside])


@pytest.mark.parametrize("name", KINDS)
@few
@given(lengths=lengths_of_documents, seed=st.integers(0, 99))
def test_the_loss_of_a_packed_row_is_that_of_its_documents_alone(name: str, lengths: list[int], seed: int) -> None:
    documents, positions = packed(lengths)
    transformer, ids = MODELS[name], tokens(1, sum(lengths), seed)
    targets = tokens(1, sum(lengths), seed + 1)
    with torch.no_grad():
        together = transformer.loss(ids, targets, documents=documents, positions=positions).cross_entropy
        parts = zip(ids.split(lengths, 1), targets.split(lengths, 1), strict=True)
        alone = sum(transformer.loss(part, target).cross_entropy.item() for part, target in parts)
    assert together.item() == pytest.approx(alone, rel=2e-6)


@pytest.mark.parametrize("name", KINDS)
def test_no_gradient_crosses_a_border(name: str) -> None:
    """The loss of the last document does not reach what the embeddings of the first one's tokens say."""
    transformer = model(name)
    documents, positions = packed((6, 7))
    ids = torch.arange(13).unsqueeze(0)
    targets = torch.full((1, 13), -100)
    targets[0, 6:] = 50
    transformer.loss(ids, targets, documents=documents, positions=positions).cross_entropy.backward()
    gradient = transformer.embed.weight.grad
    assert gradient is not None
    if not transformer.shape.tied:
        assert not gradient[:6].any() and gradient[6:13].abs().sum(-1).min() > 0
    else:  # the head sees every row of the embedding: what reaches it through a token is what a mask changes
        transformer.zero_grad()
        transformer.loss(ids[:, 6:], targets[:, 6:]).cross_entropy.backward()
        torch.testing.assert_close(gradient, transformer.embed.weight.grad, rtol=1e-4, atol=1e-6)


def test_without_documents_a_row_is_one_text() -> None:
    transformer = MODELS["llama-3.1-8b"]
    ids = tokens(1, 12)
    documents, positions = packed((12,))
    with torch.no_grad():
        plain = transformer(ids)
        torch.testing.assert_close(transformer(ids, documents=documents, positions=positions), plain)
        split, _ = packed((5, 7))
        assert not torch.allclose(transformer(ids, documents=split, positions=positions), plain, atol=1e-3)


def test_windows_and_documents_together() -> None:
    transformer = MODELS["mistral-7b-v0.1"]
    lengths = (3, 17, 10)
    documents, positions = packed(lengths)
    ids = tokens(1, 30)
    with torch.no_grad():
        together = transformer(ids, documents=documents, positions=positions)
        alone = torch.cat([transformer(part) for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
