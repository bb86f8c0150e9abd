"""Interleaving: which source each row of a mixture is of, for any row number at once and without an index of the run.

Shares are fractions a / D; the order of sources repeats every D rows, D at most 2**16, so that a table of D rows is all
there is. Within it row j of a source may stand from place floor(j D / a) on, and at the latest in place
ceil((j + 1) D / a) - 1. The earliest deadline goes first. Then no source is ever a whole row ahead of its share or
behind it (Steiner and Yeomans 1993, "Level schedules for mixed-model, just-in-time processes"; Tijdeman 1980).
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

PERIOD: Final = 2**16
"""The longest table."""


@final
class Interleaving:
    """The order of the sources of a mixture; depends on their shares and on nothing else."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        """`shares`, each above 0, of any sum. Where no table of PERIOD rows has them exactly, they are rounded."""
        self._counts: Final = _counts(shares)
        sources, numbers = _table(self._counts)
        self._sources: Final = sources
        self._numbers: Final = numbers
        self._each: Final = np.array(self._counts, dtype=np.int64)

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Of each source, as they are kept."""
        return tuple(Fraction(count, len(self._sources)) for count in self._counts)

    def place(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row numbers of the mixture, [N] -> (source of each, its number within that source), [N] each."""
        periods, places = np.divmod(rows, len(self._sources))
        sources = self._sources[places].astype(np.int64)
        return sources, periods * self._each[sources] + self._numbers[places]

    def counts(self, rows: int) -> tuple[int, ...]:
        """How many of the first `rows` rows each source has."""
        periods, rest = divmod(rows, len(self._sources))
        found = np.bincount(self._sources[:rest], minlength=len(self._counts))
        return tuple((periods * self._each + found).tolist())


def _counts(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Rows of each source in the table: exact where PERIOD allows it, else by the largest remainders, at least one."""
    whole = sum(shares, Fraction(0))
    parts = [share / whole for share in shares]
    period = lcm(*(part.denominator for part in parts))
    if period <= PERIOD:
        return tuple(int(part * period) for part in parts)
    found = [max(1, int(part * PERIOD)) for part in parts]
    by_need = sorted(range(len(parts)), key=lambda source: found[source] - parts[source] * PERIOD)
    missing = PERIOD - sum(found)
    for source in by_need[: max(0, missing)]:
        found[source] += 1
    for _ in range(-missing):  # many tiny shares were raised to one row
        found[max(range(len(found)), key=found.__getitem__)] -= 1
    return tuple(found)


def _table(counts: Sequence[int]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """(source of each row, how many rows of that source come before it), [D] each, by the earliest deadline."""
    period = sum(counts)
    sources, numbers = np.empty(period, np.uint16), np.empty(period, np.int64)
    waiting = [(0, source) for source in range(len(counts))]
    """(first place of its next row, source)"""
    ready: list[tuple[int, int]] = []
    """(last place of its next row, source)"""
    done = [0] * len(counts)
    for place in range(period):
        while waiting and waiting[0][0] <= place:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(done[source] + 1) * period // counts[source]) - 1, source))
        source = heapq.heappop(ready)[1]
        sources[place], numbers[place] = source, done[source]
        done[source] += 1
        if done[source] < counts[source]:
            heapq.heappush(waiting, (done[source] * period // counts[source], source))
    return sources, numbers
