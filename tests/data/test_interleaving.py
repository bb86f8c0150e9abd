"""Interleaving: every share is kept at every prefix, the place of any row is found by itself, nothing is stored of the
run."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.data.sequences.numbered_rows import PERIOD, Interleaving

SHARES = st.lists(st.fractions(Fraction(1, 40), 50, max_denominator=40), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@example(shares=[Fraction(1)])
@example(shares=[Fraction(1, 2), Fraction(1, 2)])
@example(shares=[Fraction(7, 10), Fraction(3, 10)])
@example(shares=[Fraction(98, 100), Fraction(1, 100), Fraction(1, 100)])
@example(shares=[Fraction(1, 3), Fraction(1, 7), Fraction(1, 11), Fraction(1, 13), Fraction(1, 17)])
@given(shares=SHARES)
@pytest.mark.long
def test_no_source_is_a_row_ahead_or_behind_at_any_prefix(shares: list[Fraction]) -> None:
    """Counted after every row, in whole numbers, over a table and a part of the next."""
    made = Interleaving(shares)
    shares_of_table = made.shares
    assert sum(shares_of_table) == 1
    period = int(np.lcm.reduce([share.denominator for share in shares_of_table]))
    sources, numbers = made.locate(np.arange(period + 500))
    rows = np.arange(1, len(sources) + 1)
    for source, share in enumerate(shares_of_table):
        counts = np.cumsum(sources == source)
        ahead = counts * period - rows * int(share * period)
        assert np.abs(ahead).max() < period, "a whole row"
        assert np.array_equal(numbers[sources == source], np.arange(counts[-1])), "in its own order, without a gap"
    for row in range(0, len(rows), 97):
        assert made.counts(row) == tuple(np.bincount(sources[:row], minlength=len(shares_of_table)).tolist())


@settings(max_examples=40, deadline=None)
@given(shares=SHARES)
def test_shares_are_those_asked_for_where_a_table_has_them(shares: list[Fraction]) -> None:
    whole = sum(shares)
    wanted = [share / whole for share in shares]
    rounded = Interleaving(shares).shares
    exact = np.lcm.reduce([share.denominator for share in wanted], dtype=object) <= PERIOD
    for share, wanted_share in zip(rounded, wanted, strict=True):
        assert share == wanted_share if exact else abs(share - wanted_share) < Fraction(len(shares), PERIOD)


@settings(max_examples=40, deadline=None)
@given(shares=SHARES, cursor=st.integers(0, 10**15), first=st.integers(0, 9), second=st.integers(0, 9))
def test_any_row_is_found_by_itself(shares: list[Fraction], cursor: int, first: int, second: int) -> None:
    """Far behind any table, the same as part of other calls, and as many before it as `counts` says."""
    made = Interleaving(shares)
    sources, numbers = made.locate(np.arange(cursor, cursor + first + second))
    for begin, end in ((0, first), (first, first + second)):
        part = made.locate(np.arange(cursor + begin, cursor + end))
        assert np.array_equal(part[0], sources[begin:end]) and np.array_equal(part[1], numbers[begin:end])
    before = made.counts(cursor)
    assert sum(before) == cursor
    for row, (source, number) in enumerate(zip(sources.tolist(), numbers.tolist(), strict=True)):
        assert number == before[source] + int((sources[:row] == source).sum())


def test_many_tiny_shares_have_a_row_each() -> None:
    made = Interleaving([Fraction(1, 10**9)] * 50 + [Fraction(1), Fraction(10**6 + 3, 10**6 + 7)])
    counts = made.counts(PERIOD)
    assert sum(counts) == PERIOD and set(counts[:50]) == {1}
    assert abs(counts[50] - counts[51]) <= 1


def test_the_order_never_changes() -> None:
    """It is part of what a run means: these are golden values."""
    sources, numbers = Interleaving([Fraction(7), Fraction(2), Fraction(1)]).locate(np.arange(12))
    assert sources.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2, 0, 0]
    assert numbers.tolist() == [0, 1, 2, 0, 3, 4, 1, 5, 6, 0, 7, 8]
    sources, _ = Interleaving([Fraction("0.3"), Fraction("0.7")]).locate(np.arange(10))
    assert sources.tolist() == [1, 1, 0, 1, 1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("sources", [1, 2, 64])
def test_one_table_serves_a_run_of_any_length(sources: int) -> None:
    made = Interleaving([Fraction(3**30 + number, 2**60) for number in range(sources)])
    assert len(made._sources) <= PERIOD
    sources_of_rows, _ = made.locate(np.arange(10**17, 10**17 + 3 * sources))
    assert set(sources_of_rows.tolist()) == set(range(sources))
