"""A run of weeks played failure by failure: saves, restarts, repairs, spare nodes. Seeded; times are simulated seconds.

Between failures nothing is played: how far a run came follows from the time. So a run of months with a thousand
failures takes a millisecond.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from math import floor
from random import Random
from statistics import fmean

from meshwright.planner.rent.goodput import Weeks

RUNS = 200
MOST_EVENTS = 40_000
"""Failures that are played for one answer; a long run is played less often, at least FEWEST times."""
FEWEST = 20
ENDLESS = 1e6
"""Failures of one run from which on it is taken to make no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What many runs came to."""

    wall_s: tuple[float, ...]
    """Of each run, sorted."""
    failures: float
    """Mean number."""
    steps_s: float

    @property
    def mean_s(self) -> float:
        """Mean time."""
        return fmean(self.wall_s)

    def quantile_s(self, share: float) -> float:
        """So much of the runs take no longer."""
        return self.wall_s[min(len(self.wall_s) - 1, floor(share * len(self.wall_s)))]

    @property
    def goodput(self) -> float:
        """Steps that count over all, of the mean run."""
        return self.steps_s / self.mean_s

    def within(self, limit_s: float, factor: float = 1.0) -> float:
        """Share of the runs that end in time, if each took `factor` times as long."""
        return sum(wall_s * factor <= limit_s for wall_s in self.wall_s) / len(self.wall_s)


def play(one: Weeks, *, seed: int = 0, runs: int = 0) -> Played:
    """So many runs (0 = RUNS, fewer of a run with many failures)."""
    runs = runs or max(FEWEST, min(RUNS, int(MOST_EVENTS / max(1.0, one.failures))))
    random = Random(seed)
    found = [_Run(one, random).play() for _ in range(runs)]
    return Played(
        wall_s=tuple(sorted(wall_s for wall_s, _ in found)), failures=fmean(number for _, number in found),
        steps_s=one.steps_s,
    )  # fmt: skip


class _Run:
    def __init__(self, of: Weeks, random: Random) -> None:
        self.of, self.random = of, random
        self.now, self.done, self.failures = of.start_s, 0.0, 0
        self.back: list[float] = []
        """When nodes under repair are there again."""
        self.spares = of.spares

    def play(self) -> tuple[float, int]:
        while self.failures < ENDLESS:
            needed_s, until_s = self._needed(), self.random.expovariate(1 / self.of.mtbf_s)
            if until_s >= needed_s:
                return self.now + needed_s, self.failures
            self.now += until_s
            self.done += self._committed(until_s)
            self._fail()
            while (until_s := self.random.expovariate(1 / self.of.mtbf_s)) < self.of.restart_s:
                self.now += until_s
                self._fail()
            self.now += self.of.restart_s
        return float("inf"), self.failures

    def _needed(self) -> float:
        """Until the end, if nothing fails: each interval ends with a save."""
        left_s = max(0.0, self.of.work_s - self.done)
        return left_s + self.of.save_s * left_s / self.of.interval_s

    def _committed(self, running_s: float) -> float:
        """Work that a checkpoint holds after so long."""
        length = self.of.interval_s + self.of.save_s
        return max(0, floor((running_s - self.of.write_s) / length)) * self.of.interval_s

    def _fail(self) -> None:
        """One failure: a spare takes over, or the first node that is repaired."""
        self.failures += 1
        if self.random.random() >= self.of.hardware:
            return
        while self.back and self.back[0] <= self.now:
            heappop(self.back)
            self.spares += 1
        heappush(self.back, self.now + self.random.expovariate(1 / self.of.repair_s))
        if self.spares:
            self.spares -= 1
        else:
            self.now = max(self.now, heappop(self.back))
