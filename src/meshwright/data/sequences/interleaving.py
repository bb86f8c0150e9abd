"""Interleaving: the source of each row of a mixture, for any row number directly and without an index of the run.

Shares are fractions a / D. The order of sources repeats every D rows, D at most 2**16, so a table of D rows suffices.
Row j of a source may take slots from floor(j D / a) to ceil((j + 1) D / a) - 1. The earliest deadline goes first. Then
no source is ever a whole row ahead of its share or behind it (Steiner and Yeomans 1993, "Level schedules for
mixed-model, just-in-time processes"; Tijdeman 1980).
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
    """Order of the sources of a mixture. It depends on their shares alone."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        """Build the table from shares above 0, rounded if no table of PERIOD rows has them exactly."""
        self._counts: Final = _counts(shares)
        sources, numbers = _table(self._counts)
        self._sources: Final = sources
        self._numbers: Final = numbers
        self._each: Final = np.array(self._counts, dtype=np.int64)

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Exact share of each source in the table."""
        return tuple(Fraction(count, len(self._sources)) for count in self._counts)

    def locate(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each row of the mixture and its number within that source: [N] -> [N], [N]."""
        periods, places = np.divmod(rows, len(self._sources))
        sources = self._sources[places].astype(np.int64)
        return sources, periods * self._each[sources] + self._numbers[places]

    def counts(self, rows: int) -> tuple[int, ...]:
        """Return how many of the first `rows` rows each source has."""
        periods, rest = divmod(rows, len(self._sources))
        tail = np.bincount(self._sources[:rest], minlength=len(self._counts))
        return tuple((periods * self._each + tail).tolist())


def _counts(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the rows of each source in the table: exact if possible, else by largest remainders and at least one."""
    whole = sum(shares, Fraction(0))
    parts = [share / whole for share in shares]
    period = lcm(*(part.denominator for part in parts))
    if period <= PERIOD:
        return tuple(int(part * period) for part in parts)
    counts = [max(1, int(part * PERIOD)) for part in parts]
    by_need = sorted(range(len(parts)), key=lambda source: counts[source] - parts[source] * PERIOD)
    missing = PERIOD - sum(counts)
    for source in by_need[: max(0, missing)]:
        counts[source] += 1
    for _ in range(-missing):  # many tiny shares were raised to one row
        counts[max(range(len(counts)), key=counts.__getitem__)] -= 1
    return tuple(counts)


def _table(counts: Sequence[int]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Return (source of each row, earlier rows of that source), [D] each, by the earliest deadline."""
    period = sum(counts)
    sources, numbers = np.empty(period, np.uint16), np.empty(period, np.int64)
    waiting = [(0, source) for source in range(len(counts))]  # (first slot of its next row, source)
    ready: list[tuple[int, int]] = []  # (last slot of its next row, source)
    done = [0] * len(counts)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(done[source] + 1) * period // counts[source]) - 1, source))
        source = heapq.heappop(ready)[1]
        sources[slot], numbers[slot] = source, done[source]
        done[source] += 1
        if done[source] < counts[source]:
            heapq.heappush(waiting, (done[source] * period // counts[source], source))
    return sources, numbers
