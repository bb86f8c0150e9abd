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
    """Not a bit of the logits of the others, in all families; those with experts multiply other rows together."""
    chosen = data.draw(st.integers(0, len(lengths) - 1))
    documents, positions = packed(lengths, rows=2)
    found, inside = MODELS[name], documents[0] == chosen
    before = tokens(2, sum(lengths), seed=data.draw(st.integers(0, 99)))
    after = before.clone()
    after[:, inside] = (after[:, inside] + 1) % VOCAB
    with torch.no_grad():
        first = found(before, documents=documents, positions=positions)
        second = found(after, documents=documents, positions=positions)
    if found.shape.moe:
        torch.testing.assert_close(first[:, ~inside], second[:, ~inside], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(first[:, ~inside], second[:, ~inside])
    assert not torch.allclose(first[:, inside], second[:, inside])


@pytest.mark.parametrize("name", KINDS)
@few
@given(lengths=lengths_of_documents, seed=st.integers(0, 99))
def test_the_loss_of_a_packed_row_is_that_of_its_documents_alone(name: str, lengths: list[int], seed: int) -> None:
    documents, positions = packed(lengths)
    found, given = MODELS[name], tokens(1, sum(lengths), seed)
    targets = tokens(1, sum(lengths), seed + 1)
    with torch.no_grad():
        together = found.loss(given, targets, documents=documents, positions=positions).cross_entropy
        parts = zip(given.split(lengths, 1), targets.split(lengths, 1), strict=True)
        alone = sum(found.loss(part, target).cross_entropy.item() for part, target in parts)
    assert together.item() == pytest.approx(alone, rel=2e-6)


@pytest.mark.parametrize("name", KINDS)
def test_no_gradient_crosses_a_border(name: str) -> None:
    """The loss of the last document does not reach what the embeddings of the first one's tokens say."""
    found = model(name)
    documents, positions = packed((6, 7))
    given = torch.arange(13).unsqueeze(0)
    targets = torch.full((1, 13), -100)
    targets[0, 6:] = 50
    found.loss(given, targets, documents=documents, positions=positions).cross_entropy.backward()
    gradient = found.embed.weight.grad
    assert gradient is not None
    if not found.shape.tied:
        assert not gradient[:6].any() and gradient[6:13].abs().sum(-1).min() > 0
    else:  # the head sees every row of the embedding: what reaches it through a token is what a mask changes
        found.zero_grad()
        found.loss(given[:, 6:], targets[:, 6:]).cross_entropy.backward()
        torch.testing.assert_close(gradient, found.embed.weight.grad, rtol=1e-4, atol=1e-6)


def test_without_documents_a_row_is_one_text() -> None:
    found = MODELS["llama-3.1-8b"]
    given = tokens(1, 12)
    documents, positions = packed((12,))
    with torch.no_grad():
        plain = found(given)
        torch.testing.assert_close(found(given, documents=documents, positions=positions), plain)
        split, _ = packed((5, 7))
        assert not torch.allclose(found(given, documents=split, positions=positions), plain, atol=1e-3)


def test_windows_and_documents_together() -> None:
    found = MODELS["mistral-7b-v0.1"]
    lengths = (3, 17, 10)
    documents, positions = packed(lengths)
    given = tokens(1, 30)
    with torch.no_grad():
        together = found(given, documents=documents, positions=positions)
        alone = torch.cat([found(part) for part in given.split(lengths, 1)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
