"""Rows of a mixture: those of its sources and no others, in the shares of the weights; of one source its very bits."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.sequences.numbered_rows import MixedRows, divide_limit
from meshwright.data.sequences.windows import IGNORED, NumberedRows, Sampler, Sequences
from tests.data.test_sample_rows import Samples, sample_lists
from tests.data.test_sample_rows import rows as sample_rows
from tests.data.test_windows import stream

FIELDS = ("tokens", "targets", "documents", "positions")
WEIGHTS = st.floats(0.05, 5)


def windows(lengths: list[int], sequence: int, offset: int = 0) -> Sampler:
    """Return windows of text whose tokens count from `offset`, which identifies their source."""
    source = stream(lengths)
    object.__setattr__(source, "tokens", source.tokens + np.uint32(offset))
    return Sampler(source, sequence=sequence, tokenizer_separator=True, seed=3)


def same(first: Sequences, second: Sequences) -> bool:
    """Bit for bit."""
    arrays = all(
        np.array_equal(getattr(first, field), getattr(second, field))
        and getattr(first, field).dtype == getattr(second, field).dtype
        for field in FIELDS
    )
    return arrays and first.packed == second.packed


TEXTS = st.lists(st.lists(st.integers(1, 12), min_size=6, max_size=20), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=6, max_size=20), cursor=st.integers(0, 99), count=st.integers(1, 9))
def test_a_mixture_of_one_text_is_that_text(lengths: list[int], cursor: int, count: int) -> None:
    rows = windows(lengths, 4)
    mixed = MixedRows([rows], [0.3])
    assert len(mixed) == len(rows)
    assert same(mixed.take(cursor, count), rows.take(cursor, count))
    for limit in (0, 2):
        pairs = zip(mixed.windows_in_order(3, limit=limit), rows.windows_in_order(3, limit=limit), strict=True)
        assert all(same(batch, expected) for batch, expected in pairs)


@settings(max_examples=30, deadline=None)
@given(samples=sample_lists(least=2), cursor=st.integers(0, 40), count=st.integers(1, 9))
def test_a_mixture_of_one_file_of_samples_is_that_file(samples: Samples, cursor: int, count: int) -> None:
    rows = sample_rows([*samples, ([1, 2], [True, True])], 16)
    assert same(MixedRows([rows], [2.0]).take(cursor, count), rows.take(cursor, count))


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, data=st.data(), cursor=st.integers(0, 300), count=st.integers(1, 12))
def test_rows_are_those_of_the_sources_in_their_own_order(
    texts: list[list[int]], data: st.DataObject, cursor: int, count: int
) -> None:
    """Row by row against the sources themselves, and wherever the batch is cut."""
    weights = [data.draw(WEIGHTS) for _ in texts]
    rows: list[NumberedRows] = [
        windows(lengths, 4, 10_000 * source_number) for source_number, lengths in enumerate(texts)
    ]
    mixed = MixedRows(rows, weights)
    batch = mixed.take(cursor, count)
    sources, numbers = mixed.interleaving.locate(np.arange(cursor, cursor + count))
    for row, (source, number) in enumerate(zip(sources.tolist(), numbers.tolist(), strict=True)):
        alone = rows[source].take(number, 1)
        assert all(np.array_equal(getattr(batch, field)[row], getattr(alone, field)[0]) for field in FIELDS)
        assert set((batch.tokens[row] // 10_000).tolist()) == {source}
    split = data.draw(st.integers(0, count))
    parts = [mixed.take(at, size) for at, size in ((cursor, split), (cursor + split, count - split)) if size]
    for field in FIELDS:
        assert np.array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(batch, field))


def test_each_source_goes_through_epochs_of_its_own() -> None:
    rows = [windows([41], 4), windows([4001], 4, 10_000)]
    mixed = MixedRows(rows, [0.5, 0.5])
    first = mixed.take(0, 60).tokens[:, 0]
    small = first[first < 10_000] // 4
    assert [sorted(small[begin : begin + 10].tolist()) for begin in (0, 10, 20)] == [list(range(10))] * 3
    assert small[:10].tolist() != small[10:20].tolist()
    large = first[first >= 10_000]
    assert len(set(large.tolist())) == len(large) == 30, "nothing of the large one is read twice before all of it is"


def test_weights_are_shares_of_trained_tokens() -> None:
    """Long prompts with short answers, and answers alone: half of the trained tokens are of each."""
    asked: Samples = [([7] * 16, [False] * 14 + [True] * 2)] * 40
    told: Samples = [([9] * 16, [True] * 16)] * 40
    mixed = MixedRows([sample_rows(asked, 16), sample_rows(told, 16)], [1, 1])
    batch = mixed.take(0, 1700)
    trained = Counter(batch.targets[batch.targets != IGNORED].tolist())
    assert trained[7] / trained[9] == pytest.approx(1, abs=0.01)
    read = Counter(batch.tokens[:, 0].tolist())
    assert read[7] == pytest.approx(7.5 * read[9], rel=0.02)


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS, data=st.data(), count=st.integers(1, 7), limit=st.integers(0, 9))
def test_an_evaluation_has_each_row_once_and_whole_batches(
    texts: list[list[int]], data: st.DataObject, count: int, limit: int
) -> None:
    weights = [data.draw(WEIGHTS) for _ in texts]
    rows = [windows(lengths, 4, 10_000 * source) for source, lengths in enumerate(texts)]
    batches = list(MixedRows(rows, weights).windows_in_order(count, limit=limit))
    assert [len(batch.tokens) for batch in batches[:-1]] == [count] * (len(batches) - 1)
    assert 0 < len(batches[-1].tokens) <= count
    tokens = np.concatenate([batch.tokens for batch in batches])
    most = divide_limit(weights, limit)
    expected = [
        batch.tokens
        for source_rows, share in zip(rows, most, strict=True)
        for batch in source_rows.windows_in_order(99, limit=share)
    ]
    assert np.array_equal(tokens, np.concatenate(expected))


def test_limits_are_by_weight_and_at_least_one() -> None:
    assert divide_limit([0.7, 0.3], 64) == [45, 19]
    assert divide_limit([1000, 1], 8) == [8, 1]
    assert divide_limit([1, 2], 0) == [0, 0]
