"""Sample rows: packed or not, the loss and its gradients are the same; what is cut is cut between characters."""

import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.data.chat.encoder import TRAINED
from meshwright.data.corpus.corpus import TokenStream
from meshwright.data.sequences.sample_rows import SampleRows
from meshwright.data.sequences.windows import IGNORED, Sequences
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.data.tokens.word_encoder import byte_alphabet
from meshwright.spec import Data
from meshwright.spec.errors import DataError
from tests.data.chats_for_tests import WORDS, tokenizer_json
from tests.model.shrunk import VOCAB, model

BYTES = Tokenizer.bytes()
Samples = list[tuple[list[int], list[bool]]]


def stream(samples: Samples) -> TokenStream:
    """Samples of (ids, whether each is trained), as a cache holds them."""
    lengths = [len(ids) for ids, _ in samples]
    tokens = np.array([token for ids, _ in samples for token in ids], dtype=np.uint16)
    marks = np.array([TRAINED * mark for _, marks in samples for mark in marks], dtype=np.uint8)
    return TokenStream(
        tokens=tokens,
        starts=np.cumsum([0, *lengths])[:-1].astype(np.int64),
        num_tokens=int((marks > 0).sum()),
        num_bytes=0,
        num_documents=len(samples),
        marks=marks,
    )


def rows(samples: Samples, sequence: int, tokenizer: Tokenizer = BYTES, seed: int = 0, **data: Any) -> SampleRows:
    return SampleRows(
        stream(samples), Data(path="chat.jsonl", form="samples", **data), tokenizer, sequence=sequence, seed=seed
    )


SAID = TRAINED | 3
"""The mark of what an assistant says."""


def marked_rows(samples: list[tuple[list[int], list[int]]], sequence: int) -> SampleRows:
    samples_stream = stream([(ids, [False] * len(ids)) for ids, _ in samples])
    marks = np.array([mark for _, marks in samples for mark in marks], dtype=np.uint8)
    return SampleRows(
        replace(samples_stream, marks=marks), Data(path="chat.jsonl", form="samples"), BYTES, sequence=sequence, seed=0
    )


@st.composite
def sample_lists(draw: st.DrawFn, longest: int = 12, least: int = 1) -> Samples:
    """Return ASCII samples of one byte per token, which are whole wherever they are cut."""
    assert VOCAB <= 128
    samples = []
    for _ in range(draw(st.integers(least, 12))):
        size = draw(st.integers(1, longest))
        ids = draw(st.lists(st.integers(1, VOCAB - 1), min_size=size, max_size=size))
        samples.append((ids, draw(st.lists(st.booleans(), min_size=size, max_size=size))))
    return samples


def documents_in(batch: Sequences) -> list[tuple[list[int], list[int], list[int]]]:
    """(tokens, targets, positions) of every document of every row."""
    documents = []
    for row in range(len(batch.tokens)):
        for number in range(batch.documents[row].max() + 1):
            here = batch.documents[row] == number
            documents.append(tuple(part[row][here].tolist() for part in (batch.tokens, batch.targets, batch.positions)))
    return documents


@settings(max_examples=60, deadline=None)
@given(samples=sample_lists(longest=20), sequence=st.integers(2, 16), packing=st.sampled_from(["best-fit", "off"]))
def test_every_sample_with_a_trained_token_is_a_document_once_an_epoch(
    samples: Samples, sequence: int, packing: str
) -> None:
    cut = [(ids[:sequence], marks[:sequence]) for ids, marks in samples]
    trains = [(ids, marks) for ids, marks in cut if any(marks[1:])]
    if not trains:
        with pytest.raises(DataError) as error:
            rows(samples, sequence, packing=packing)
        assert str(error.value) == (
            f"data.path=chat.jsonl: no sample has a trained token in its first recipe.sequence={sequence} tokens"
        )
        return
    made = rows([(ids, marks) for ids, marks in samples], sequence, packing=packing)
    trained = [
        document
        for document in documents_in(made.take(0, len(made)))
        if any(target != IGNORED for target in document[1])
    ]
    expected = [
        (ids, [*(t if m else IGNORED for t, m in zip(ids[1:], marks[1:], strict=True)), IGNORED], list(range(len(ids))))
        for ids, marks in trains
    ]
    assert sorted(trained) == sorted(expected)
    fitted = made.fitted
    assert fitted.retained + fitted.left_out == len(samples)
    assert fitted.overlong == sum(len(ids) > sequence for ids, _ in samples)


def whole_loss(batch: Sequences) -> tuple[float, dict[str, torch.Tensor]]:
    """Summed loss of all rows, and its gradients, of a tiny Llama."""
    net = model("llama-3.1-8b")
    named = {name: torch.from_numpy(getattr(batch, name)) for name in ("tokens", "targets", "documents", "positions")}
    borders = {"documents": named["documents"], "positions": named["positions"]} if batch.packed else {}
    loss = net.loss(named["tokens"], named["targets"], **borders).cross_entropy
    loss.backward()
    return loss.item(), {
        name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None
    }


@settings(max_examples=8, deadline=None, derandomize=True)
@given(samples=sample_lists(longest=11, least=3))
def test_packed_and_unpacked_samples_have_one_loss_and_one_gradient(samples: Samples) -> None:
    samples = [*samples, ([1, 2, 3, 4], [False, True, True, True])]
    packed, unpacked = (rows(samples, 24, packing=packing) for packing in ("best-fit", "off"))
    assert len(packed) <= len(unpacked)
    first, gradients = whole_loss(packed.take(0, len(packed)))
    second, others = whole_loss(unpacked.take(0, len(unpacked)))
    assert first == pytest.approx(second, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-4, atol=1e-5)


CHARACTERS = st.lists(
    st.sampled_from([*"ab \n", "\u00e9", "\u65e5", "\U0001f600", "\ufffd", "\u0301", *WORDS]), min_size=3, max_size=12
)


@pytest.mark.parametrize("name", ["bytes", "gpt2", "qwen2", "metaspace", "sentencepiece"])
@settings(max_examples=30, deadline=None)
@example(text="\U0001f600" * 8, sequence=11)
@example(text="\u65e5\u672c\u8a9e" * 4, sequence=8)
@example(text="a\ufffda", sequence=3)
@example(text="\u65e5\u672c\u8a9eaa", sequence=3)
@given(text=CHARACTERS.map("".join), sequence=st.integers(3, 40))
def test_a_cut_sample_never_ends_in_half_a_character(name: str, text: str, sequence: int) -> None:
    """Held against the bytes of the text: those of the tokens that stay are whole characters."""
    tokenizer = BYTES if name == "bytes" else Tokenizer(tokenizer_json(name), bos="<s>", eos="</s>")
    ids = [int(token) for token in tokenizer.encode(text, special=True)]
    if len(ids) <= sequence:
        return
    made = rows([(ids, [True] * len(ids)), ([9, 9], [True, True])], sequence, tokenizer)
    length = int(made._lengths[0, 0])
    assert length <= sequence
    if (
        name not in ("qwen2", "gpt2") and "\ufffd" not in text
    ):  # these have tokens that begin or end inside of characters
        assert length >= sequence - 3
    if name in ("metaspace", "sentencepiece"):
        spelled = b"".join(byte_of(tokenizer.spell(token), tokenizer, token) for token in ids[:length])
    else:
        spelled = b"".join(raw(tokenizer, token) for token in ids[:length])
    spelled.decode()  # an error where the last one is half


def raw(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token of a byte-level tokenizer."""
    spelled = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    piece = str(tokenizer._library.id_to_token(token))
    return (
        array.array("B", [spelled[letter] for letter in piece]).tobytes() if piece[0] != "<" or piece == "<" else b"<>"
    )


def byte_of(text: str, tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token of one that falls back on bytes: `<0x41>`, or a word."""
    piece = str(tokenizer._library.id_to_token(token))
    return bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else text.encode()


def test_what_is_too_long_is_cut_left_out_or_refused() -> None:
    samples: Samples = [
        ([65] * 4, [False, True, True, True]),
        ([66] * 9, [False] * 8 + [True]),
        ([67] * 9, [True] * 9),
        ([68] * 3, [True, False, False]),
    ]
    cut = rows(samples, 6).fitted
    assert (cut.retained, cut.overlong, cut.left_out, cut.untrained, cut.cut_tokens) == (2, 2, 2, 2, 3)
    dropped = rows(samples, 6, overlong="drop").fitted
    assert (dropped.retained, dropped.overlong, dropped.left_out, dropped.cut_tokens) == (1, 2, 3, 0)
    with pytest.raises(DataError) as error:
        rows(samples, 6, overlong="refuse")
    assert str(error.value) == (
        "data.path=chat.jsonl: 2 of 4 samples are longer than recipe.sequence=6 tokens, the longest 9: take a longer "
        "sequence, or data.overlong=truncate or drop"
    )
    assert rows(samples, 9, overlong="refuse").fitted.overlong == 0


def test_samples_that_all_lose_their_end_are_refused() -> None:
    """One that keeps an answer's end is enough, be it of an earlier answer; texts without roles have no answers."""
    long = ([*range(1, 31)], [0] * 4 + [SAID] * 26)
    earlier = ([*range(1, 31)], [0] * 4 + [SAID] * 3 + [1] * 2 + [SAID] * 21)
    with pytest.raises(DataError, match=r"would lose its end. Raise recipe.sequence .the longest sample has 30"):
        marked_rows([long, long], 16)
    assert len(marked_rows([long, earlier], 16)) == 2
    assert len(marked_rows([long, long], 30)) == 2
    assert len(rows([([*range(1, 31)], [True] * 30)], 16)) == 1


def test_every_epoch_has_every_row_in_another_order() -> None:
    samples: Samples = [([number, number, number], [True] * 3) for number in range(40)]
    made = rows(samples, 3)
    epochs = [made.take(len(made) * epoch, len(made)).tokens[:, 0].tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert (
        epochs[0] != epochs[1] != epochs[2] and epochs[0] != rows(samples, 3, seed=1).take(0, 40).tokens[:, 0].tolist()
    )
    across = made.take(30, 20).tokens[:, 0].tolist()
    assert across == [*epochs[0][30:], *epochs[1][:10]]
