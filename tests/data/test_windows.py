"""Windows: every token a target exactly once, borders kept, epochs reshuffled, the cursor free to be split."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.corpus.corpus import TokenStream
from meshwright.data.sequences.windows import IGNORED, Sampler, Sequences
from meshwright.spec.errors import DataError

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=30)


def stream(lengths: list[int]) -> TokenStream:
    """Documents of these lengths; token number i of the stream has the id i, so that every place can be told."""
    starts = np.cumsum([0, *lengths])[:-1].astype(np.int64)
    total = sum(lengths)
    tokens = np.arange(total, dtype=np.uint32)
    return TokenStream(tokens=tokens, starts=starts, num_tokens=total, num_bytes=total, num_documents=len(lengths))


def in_order(source: TokenStream, sequence: int, separator: bool) -> Sampler:
    return Sampler(source, sequence=sequence, tokenizer_separator=separator, seed=0, shuffle=False)


def targets(batches: list[Sequences]) -> list[int]:
    return [t for batch in batches for t in batch.targets.ravel().tolist() if t != IGNORED]


def check_rows(batch: Sequences, source: TokenStream, separator: bool) -> None:
    """Every property of a row, told from the ids alone."""
    begins = set(source.starts.tolist())
    rows = zip(batch.tokens, batch.targets, batch.documents, batch.positions, strict=True)
    for tokens, wanted, documents, positions in rows:
        document, position = 0, 0
        for index, token in enumerate(tokens.tolist()):
            if index and token in begins:
                document, position = document + 1, 0
            assert (documents[index], positions[index]) == (document, position)
            crosses = token + 1 in begins and not separator
            assert wanted[index] == (IGNORED if crosses else token + 1)
            position += 1
    assert batch.packed == bool(batch.documents.any())


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, sequence=st.integers(1, 9), seed=st.integers(0, 2**32), separator=st.booleans())
def test_an_epoch_holds_every_target_once(lengths: list[int], sequence: int, seed: int, separator: bool) -> None:
    source = stream(lengths)
    if source.num_tokens <= sequence:
        return
    sampler = Sampler(source, sequence=sequence, tokenizer_separator=separator, seed=seed)
    assert len(sampler) == (source.num_tokens - 1) // sequence
    batch = sampler.take(0, len(sampler))
    check_rows(batch, source, separator)
    covered = range(1, len(sampler) * sequence + 1)
    begins = set() if separator else set(source.starts.tolist())
    assert sorted(targets([batch])) == [token for token in covered if token not in begins]


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, sequence=st.integers(1, 9), count=st.integers(1, 5), separator=st.booleans())
def test_in_order_every_token_is_scored_once(lengths: list[int], sequence: int, count: int, separator: bool) -> None:
    source = stream(lengths)
    batches = list(in_order(source, sequence, separator).windows_in_order(count))
    begins = {0} if separator else set(source.starts.tolist())
    assert targets(batches) == [token for token in range(source.num_tokens) if token not in begins | {0}]
    for batch in batches:
        assert batch.tokens.shape == (len(batch.tokens), sequence) and len(batch.tokens) <= count


def test_the_last_window_is_padded_with_a_document_of_its_own() -> None:
    (batch,) = in_order(stream([4, 3]), 5, True).windows_in_order(4)
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4], [5, 6, 0, 0, 0]]
    assert batch.targets.tolist() == [[1, 2, 3, 4, 5], [6, IGNORED, IGNORED, IGNORED, IGNORED]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0], [0, 1, 0, 1, 2]]
    assert [array.dtype for array in (batch.tokens, batch.targets, batch.documents, batch.positions)] == [
        np.int64,
        np.int64,
        np.int32,
        np.int32,
    ]


@settings(max_examples=60, deadline=None)
@given(cursor=st.integers(0, 200), first=st.integers(1, 9), second=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_cursor_can_be_split_anywhere(cursor: int, first: int, second: int, seed: int) -> None:
    sampler = Sampler(stream([7] * 10), sequence=4, tokenizer_separator=False, seed=seed)
    whole = sampler.take(cursor, first + second)
    parts = sampler.take(cursor, first), sampler.take(cursor + first, second)
    for field in ("tokens", "targets", "documents", "positions"):
        joined = np.concatenate([getattr(part, field) for part in parts])
        assert np.array_equal(getattr(whole, field), joined)


def test_every_epoch_has_all_windows_in_another_order() -> None:
    sampler = Sampler(stream([200]), sequence=4, tokenizer_separator=True, seed=1)
    size = len(sampler)
    epochs = [sampler.windows(number * size, size).tolist() for number in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = Sampler(stream([200]), sequence=4, tokenizer_separator=True, seed=1)
    assert again.windows(size, size).tolist() == epochs[1]
    other = Sampler(stream([200]), sequence=4, tokenizer_separator=True, seed=2)
    assert other.windows(0, size).tolist() != epochs[0]


def test_without_shuffling_windows_come_in_order() -> None:
    sampler = Sampler(stream([41]), sequence=4, tokenizer_separator=True, seed=0, shuffle=False)
    assert sampler.windows(8, 4).tolist() == [8, 9, 0, 1]


def test_a_limit_spreads_the_windows() -> None:
    sampler = Sampler(stream([401]), sequence=4, tokenizer_separator=True, seed=0, shuffle=False)
    numbers = [batch.tokens[:, 0] // 4 for batch in sampler.windows_in_order(3, limit=5)]
    assert np.concatenate(numbers).tolist() == [0, 20, 40, 60, 80]


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_sequence_longer_than_the_data(tokens: int) -> None:
    with pytest.raises(DataError, match=rf"recipe.sequence=8 needs 9 tokens and the data has {tokens}: take "):
        Sampler(stream([tokens]), sequence=8, tokenizer_separator=True, seed=0)
    held_out = Sampler(stream([tokens]), sequence=8, tokenizer_separator=True, seed=0, shuffle=False)
    assert targets(list(held_out.windows_in_order(4))) == list(range(1, tokens))
    with pytest.raises(DataError, match=r"recipe.sequence=8"):
        held_out.take(0, 1)


def test_an_empty_stream_has_no_windows() -> None:
    empty = TokenStream(
        tokens=np.empty(0, np.uint16), starts=np.empty(0, np.int64), num_tokens=0, num_bytes=0, num_documents=0
    )
    assert list(in_order(empty, 8, True).windows_in_order(4)) == []


def test_documents_are_measured_as_tokens_find_them() -> None:
    """Rows of 8 in documents of 2, 2 and 4, and of 8: 2 x 2 + 2 x 2 + 4 x 4 and 8 x 8, over 16 tokens."""
    documents = np.array([[0, 0, 1, 1, 2, 2, 2, 2], [0] * 8], dtype=np.int32)
    plain = np.zeros((2, 8), dtype=np.int64)
    rows = Sequences(tokens=plain, targets=plain, documents=documents, positions=documents, packed=True)
    assert rows.document_tokens == (4 + 4 + 16 + 64) / 16
