"""Interleaving: every share is kept at every prefix, the place of any row is found by itself, nothing is stored of the
run."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.data.interleaving import PERIOD, Interleaving

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
    kept = made.shares
    assert sum(kept) == 1
    period = int(np.lcm.reduce([share.denominator for share in kept]))
    sources, numbers = made.place(np.arange(period + 500))
    rows = np.arange(1, len(sources) + 1)
    for source, share in enumerate(kept):
        counts = np.cumsum(sources == source)
        ahead = counts * period - rows * int(share * period)
        assert np.abs(ahead).max() < period, "a whole row"
        assert np.array_equal(numbers[sources == source], np.arange(counts[-1])), "in its own order, without a gap"
    for row in range(0, len(rows), 97):
        assert made.counts(row) == tuple(np.bincount(sources[:row], minlength=len(kept)).tolist())


@settings(max_examples=40, deadline=None)
@given(shares=SHARES)
def test_shares_are_those_asked_for_where_a_table_has_them(shares: list[Fraction]) -> None:
    whole = sum(shares)
    wanted = [share / whole for share in shares]
    kept = Interleaving(shares).shares
    exact = np.lcm.reduce([share.denominator for share in wanted], dtype=object) <= PERIOD
    for one, other in zip(kept, wanted, strict=True):
        assert one == other if exact else abs(one - other) < Fraction(len(shares), PERIOD)


@settings(max_examples=40, deadline=None)
@given(shares=SHARES, cursor=st.integers(0, 10**15), first=st.integers(0, 9), second=st.integers(0, 9))
def test_any_row_is_found_by_itself(shares: list[Fraction], cursor: int, first: int, second: int) -> None:
    """Far behind any table, the same as part of other calls, and as many before it as `counts` says."""
    made = Interleaving(shares)
    sources, numbers = made.place(np.arange(cursor, cursor + first + second))
    for begin, end in ((0, first), (first, first + second)):
        part = made.place(np.arange(cursor + begin, cursor + end))
        assert np.array_equal(part[0], sources[begin:end]) and np.array_equal(part[1], numbers[begin:end])
    before = made.counts(cursor)
    assert sum(before) == cursor
    for place, (source, number) in enumerate(zip(sources.tolist(), numbers.tolist(), strict=True)):
        assert number == before[source] + int((sources[:place] == source).sum())


def test_many_tiny_shares_have_a_row_each() -> None:
    made = Interleaving([Fraction(1, 10**9)] * 50 + [Fraction(1), Fraction(10**6 + 3, 10**6 + 7)])
    counts = made.counts(PERIOD)
    assert sum(counts) == PERIOD and set(counts[:50]) == {1}
    assert abs(counts[50] - counts[51]) <= 1


def test_the_order_never_changes() -> None:
    """It is part of what a run means: these are golden values."""
    sources, numbers = Interleaving([Fraction(7), Fraction(2), Fraction(1)]).place(np.arange(12))
    assert sources.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2, 0, 0]
    assert numbers.tolist() == [0, 1, 2, 0, 3, 4, 1, 5, 6, 0, 7, 8]
    sources, _ = Interleaving([Fraction("0.3"), Fraction("0.7")]).place(np.arange(10))
    assert sources.tolist() == [1, 1, 0, 1, 1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("sources", [1, 2, 64])
def test_one_table_serves_a_run_of_any_length(sources: int) -> None:
    made = Interleaving([Fraction(3**30 + number, 2**60) for number in range(sources)])
    assert len(made._sources) <= PERIOD
    found, _ = made.place(np.arange(10**17, 10**17 + 3 * sources))
    assert set(found.tolist()) == set(range(sources))
