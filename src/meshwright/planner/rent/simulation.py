"""Simulation of a run of weeks, failure by failure: saves, restarts, repairs, spare nodes. Seeded.

Between failures nothing is simulated: the progress of a run follows from the time. So a run of months with a thousand
failures takes a millisecond.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from math import floor
from random import Random
from statistics import fmean

from meshwright.planner.rent.goodput import RunTiming

RUNS = 200
MOST_EVENTS = 40_000
"""Failures that are simulated for one answer. A long run is simulated less often, at least FEWEST times."""
FEWEST = 20
ENDLESS = 1e6
"""Failures of a run beyond which it is taken to make no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRuns:
    """Statistics over all simulated runs."""

    wall_s: tuple[float, ...]
    """Seconds of each run, sorted."""
    failures: float
    """Mean number of failures."""
    steps_s: float

    @property
    def mean_s(self) -> float:
        """Mean time."""
        return fmean(self.wall_s)

    def quantile_s(self, share: float) -> float:
        """Return the time that this share of the runs does not exceed."""
        return self.wall_s[min(len(self.wall_s) - 1, floor(share * len(self.wall_s)))]

    @property
    def goodput(self) -> float:
        """Share of the mean time in which lasting steps are done."""
        return self.steps_s / self.mean_s

    def within(self, limit_s: float, factor: float = 1.0) -> float:
        """Return the share of the runs that end in time, if each took `factor` times as long."""
        return sum(wall_s * factor <= limit_s for wall_s in self.wall_s) / len(self.wall_s)


def simulate(timing: RunTiming, *, seed: int = 0, runs: int = 0) -> SimulatedRuns:
    """Simulate `runs` runs (0 = RUNS, fewer of a run with many failures)."""
    runs = runs or max(FEWEST, min(RUNS, int(MOST_EVENTS / max(1.0, timing.failures))))
    random = Random(seed)
    outcomes = [_Run(timing, random).play() for _ in range(runs)]
    return SimulatedRuns(
        wall_s=tuple(sorted(wall_s for wall_s, _ in outcomes)), failures=fmean(number for _, number in outcomes),
        steps_s=timing.steps_s,
    )  # fmt: skip


class _Run:
    def __init__(self, timing: RunTiming, random: Random) -> None:
        self.timing, self.random = timing, random
        self.now, self.done, self.failures = timing.start_s, 0.0, 0
        self.back: list[float] = []
        """Times at which nodes under repair come back."""
        self.spares = timing.spares

    def play(self) -> tuple[float, int]:
        while self.failures < ENDLESS:
            needed_s, until_s = self._needed(), self.random.expovariate(1 / self.timing.mtbf_s)
            if until_s >= needed_s:
                return self.now + needed_s, self.failures
            self.now += until_s
            self.done += self._committed(until_s)
            self._fail()
            while (until_s := self.random.expovariate(1 / self.timing.mtbf_s)) < self.timing.restart_s:
                self.now += until_s
                self._fail()
            self.now += self.timing.restart_s
        return float("inf"), self.failures

    def _needed(self) -> float:
        """Return the time until the end without failures. Each interval ends with a save."""
        left_s = max(0.0, self.timing.work_s - self.done)
        return left_s + self.timing.save_s * left_s / self.timing.interval_s

    def _committed(self, running_s: float) -> float:
        """Return the work that a checkpoint holds after `running_s`."""
        length = self.timing.interval_s + self.timing.save_s
        return max(0, floor((running_s - self.timing.write_s) / length)) * self.timing.interval_s

    def _fail(self) -> None:
        """Handle one failure: a spare takes over, or the first node that is repaired."""
        self.failures += 1
        if self.random.random() >= self.timing.hardware:
            return
        while self.back and self.back[0] <= self.now:
            heappop(self.back)
            self.spares += 1
        heappush(self.back, self.now + self.random.expovariate(1 / self.timing.repair_s))
        if self.spares:
            self.spares -= 1
        else:
            self.now = max(self.now, heappop(self.back))
