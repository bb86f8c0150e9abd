"""Time of a long run: steps, saves, failures, restarts, missing nodes, evaluation; in closed form and simulated.

`simulate` plays the same, failure by failure; a test compares the two. Goodput is the share of the time in which
lasting steps are done. Failures are a Poisson process: they come at any time, also during saves and restarts.

    save_s      delta   time that a save takes from training
    restart_s   R       time between a failure and the next step
    mtbf_s      M       mean time between failures of all devices together
    interval_s  tau     work between two saves

The simulation is seeded and knows repairs and spare nodes. Between failures nothing is simulated: the progress of a run
follows from the time. So a run of months with a thousand failures takes a millisecond.

A failure rate is unexpected interruptions per device-hour. Llama 3's is the default: it is the largest count, and the
only one that lists the causes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heappop, heappush
from math import exp, expm1, factorial, floor, inf, log, sqrt
from random import Random
from statistics import fmean
from typing import Any

from meshwright.spec.errors import ArgumentError
from meshwright.spec.units import duration, many

HOUR_S, DAY_S = 3600.0, 86_400.0
MOST_NODES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """Report of one run."""

    name: str
    interruptions: float
    devices: int
    days: float

    @property
    def mtbf_device_hours(self) -> float:
        """Mean hours of one device between interruptions."""
        return self.devices * self.days * 24 / self.interruptions


LLAMA_3 = FailureRecord(name="Llama 3 405B", interruptions=419, devices=16_384, days=54)
"""arXiv:2407.21783, section 3.3.4 and table 5: 419 unexpected interruptions in 54 days."""
HARDWARE = 0.78
"""Share of interruptions after which a node is replaced: confirmed or suspected hardware (Llama 3, section 3.3.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions of a run of weeks. Answers name the defaults."""

    mtbf_device_hours: float = LLAMA_3.mtbf_device_hours
    hardware: float = HARDWARE
    restart_s: float = 180.0
    """Time from a failure to the first step, without reading the checkpoint. Also the time before the first step.

    A death is detected within a second and a hang within 5 minutes (docs/failures.md). Ranks start and compile for 20
    to 90 s.
    """
    repair_s: float = DAY_S
    """Time until a failed node comes back."""
    storage_bytes_per_s: float = 2e9
    """Bandwidth of each node to and from the storage of checkpoints."""
    storage_limit: float = 2e12
    """Bandwidth of the whole storage in bytes/s: that of Llama 3's run (arXiv:2407.21783, section 3.3.1)."""
    evaluation: float = 0.01
    """Share of the steps' time that evaluations take."""
    spares: int | None = None
    """Nodes beyond those that train. None = as many as make the run cheapest."""

    @property
    def rate(self) -> str:
        """Words on the failure rate, which name the assumption if it is the default."""
        if self.mtbf_device_hours != LLAMA_3.mtbf_device_hours:
            return f"one per {self.mtbf_device_hours:,.0f} hour{'s' * (round(self.mtbf_device_hours) != 1)} of a device"
        record = LLAMA_3
        return (
            f"assumed: the rate of {record.name}, {record.interruptions:g} unexpected interruptions in "
            f"{record.days:g} days on {record.devices:,} GPUs"
        )


def asked_conditions(
    mtbf: float | None = None, restart: float | None = None, repair: float | None = None,
    storage: float | None = None, evaluation: float | None = None, spares: int | None = None,
) -> Conditions:  # fmt: skip
    """Return the conditions, with defaults for None. Raises ArgumentError out of range.

    `mtbf` and `repair` are hours, `restart` seconds, `storage` GB/s.
    """
    asked: dict[str, Any] = {}
    for name, number, least, most, key, unit in (
        ("mtbf", mtbf, 1, 1e9, "mtbf_device_hours", 1.0), ("restart", restart, 0, 1e6, "restart_s", 1.0),
        ("repair", repair, 0.01, 1e5, "repair_s", HOUR_S), ("storage", storage, 1e-3, 1e5, "storage_bytes_per_s", 1e9),
        ("evaluation", evaluation, 0, 10, "evaluation", 1.0), ("spares", spares, 0, MOST_NODES, "spares", 1),
    ):  # fmt: skip
        if number is None:
            continue
        if not least <= number <= most:
            raise ArgumentError(name, number, f"must be at least {least:g} and at most {most:,.10g}")
        asked[key] = number * unit
    if storage is not None:  # who names the bandwidth of a node knows the whole
        asked["storage_limit"] = inf
    return Conditions(**asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Cost of a checkpoint."""

    total_bytes: float
    stall_s: float
    """Time that training waits: until the fullest rank's part is copied to its host."""
    write_s: float
    """Time that a thread then writes. The checkpoint counts only afterwards."""


def saves_of(
    rank_bytes: float, total_bytes: float, nodes: int, host_bytes_per_s: float, conditions: Conditions
) -> Saves:
    """Return the cost of a checkpoint. If the bandwidth to the host is unknown, training waits for the write."""
    write_s = total_bytes / min(nodes * conditions.storage_bytes_per_s, conditions.storage_limit)
    stall_s = rank_bytes / host_bytes_per_s if host_bytes_per_s else write_s
    return Saves(total_bytes=total_bytes, stall_s=stall_s, write_s=write_s)


def mean_wait(spares: int, load: float, length: float) -> float:
    """Return the mean wait for missing nodes of a run that starts with all nodes working, in repair times.

    `length`: time of the run without these waits, in repair times. `load`: mean number of nodes that fail in one. A
    failure without a spare waits for the first of spares + 1 nodes under repair, and no node fails meanwhile. So in
    time without waits, the number under repair is that of Erlang's loss system with a place per spare. The time in
    which all places are taken has a Laplace transform in closed form, inverted at `length` (H. Stehfest, Algorithm 368,
    Communications of the ACM 13 (1), 1970).
    """
    blocked = 0.0
    for number, weight in enumerate(STEHFEST, 1):
        rate = number * log(2) / length
        passage, reached = 0.0, 1.0  # transforms of the times from one place less to this number, and from none
        for taken in range(spares):
            passage = load / (load + rate + taken * (1 - passage))
            reached *= passage
        blocked += weight * reached / (rate + spares * (1 - passage)) / number
    return load / (spares + 1) * max(0.0, blocked)


def _stehfest(points: int) -> Iterator[float]:
    """Yield the weights of an even number of points."""
    half = points // 2
    for n in range(1, points + 1):
        yield (-1) ** (half + n) * sum(
            Fraction(k**half * factorial(2 * k), factorial(half - k) * factorial(k) * factorial(k - 1))
            / (factorial(n - k) * factorial(2 * k - n))
            for k in range((n + 1) // 2, min(n, half) + 1)
        )  # fmt: skip


STEHFEST = tuple(map(float, _stehfest(14)))
"""Weights up to 1e9 of terms that nearly cancel: with more points, double precision loses more than they add."""
ENDLESS_RATIO = 1000
"""Time with failures over time without, from which a run is taken never to end."""
MOST_SPARES = 64
MOST_SHARE = 8
"""Nodes per spare node, at least. One spare is always allowed."""


def expected_wall_s(work_s: float, interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the mean time from start to end of a run of `work_s`: M e^(R/M) (e^((tau + delta)/M) - 1) T/tau.

    J. T. Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (3), eq.
    20. Exact for a Poisson process, whole intervals, and a save at the end of each.
    """
    segments = work_s / interval_s
    try:
        return mtbf_s * exp(restart_s / mtbf_s) * expm1((interval_s + save_s) / mtbf_s) * segments
    except OverflowError:  # failures come so often that nothing lasts
        return float("inf")


def exact_interval(save_s: float, mtbf_s: float) -> float:
    """Return the work between saves that makes `expected_wall_s` least, whatever the restart takes.

    Its derivative is zero where 1 - x = e^(-x - delta/M), x = tau/M. Newton's method descends to it from a longer one,
    sqrt(2 delta M) (J. W. Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17 (9)).
    """
    share = save_s / mtbf_s
    x = sqrt(2 * share)
    for _ in range(60):
        slope = -expm1(-x - share)
        step = (x - slope) / slope if slope else 0.0
        x -= step
        if abs(step) <= 1e-12 * x:
            break
    return x * mtbf_s


TOLERANCE = 1e-3
"""Relative error of an interval that is found by bisection."""
TINY = 1e-6
"""Shortest interval that is tried, over the mean time between failures."""
NEGLIGIBLE = 1e-3
"""Share of the time that rarer saves may cost. To gain less, more bytes are not written: often ten times as many."""


def rare_interval(save_s: float, mtbf_s: float) -> float:
    """Return the longest work between saves that makes `expected_wall_s` at most NEGLIGIBLE more than the least.

    It is at most an hour, unless saves that are rarer still are best: nobody likes to lose more.
    """

    def takes_s(interval_s: float) -> float:
        return expected_wall_s(1.0, interval_s, save_s, 0.0, mtbf_s)

    low_s = max(exact_interval(save_s, mtbf_s), TINY * mtbf_s)  # a save may cost nothing
    high_s, most_s = max(low_s, HOUR_S), (1 + NEGLIGIBLE) * takes_s(low_s)
    if takes_s(high_s) <= most_s:
        return high_s
    while high_s > (1 + TOLERANCE) * low_s:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if takes_s(middle_s) <= most_s else (low_s, middle_s)
    return low_s


BUSY = 0.1
"""Largest share of the time in which a save may be under way: no step time includes its traffic."""
MOST_STRETCH = 1.1
"""Longest time of a run with that limit, over its time without."""


def best_interval(save_s: float, mtbf_s: float, write_s: float, step_s: float, work_s: float) -> float:
    """Return the rarest interval within limits: at least a step and the time of writing, at most the run.

    Writing is also under way for at most BUSY of the time, unless so much work would be lost that the run takes longer
    than MOST_STRETCH.
    """
    shortest_s = max(rare_interval(save_s, mtbf_s), write_s, step_s)
    calm_s = max(shortest_s, write_s / BUSY)
    takes_s, at_least_s = (expected_wall_s(1.0, interval_s, save_s, 0.0, mtbf_s) for interval_s in (calm_s, shortest_s))
    return min(work_s, calm_s if takes_s <= MOST_STRETCH * at_least_s else shortest_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTiming:
    """Timing of a long run on its cluster."""

    work_s: float
    """Time of steps and evaluations, undisturbed."""
    steps_s: float
    """Time of the steps alone."""
    start_s: float
    """Time before the first step: ranks start and compile."""
    interval_s: float
    """Work between saves."""
    save_s: float
    write_s: float
    restart_s: float
    """Time from a failure, with a spare at hand, to the first step, including reading the checkpoint."""
    mtbf_s: float
    """Mean time between failures of all devices that train."""
    hardware: float
    repair_s: float
    nodes: int
    spares: int

    @property
    def running_s(self) -> float:
        """Mean time without waits for nodes. Each failure also loses the time of writing a checkpoint."""
        # A failure while a checkpoint is written loses it, so that time is done again.
        again_s = self.restart_s + self.write_s
        return expected_wall_s(self.work_s, self.interval_s, self.save_s, again_s, self.mtbf_s)

    @property
    def is_endless(self) -> bool:
        """True if failures leave the run no progress: it takes ENDLESS_RATIO times as long as without them."""
        return self.running_s + self.waiting_s > ENDLESS_RATIO * self.work_s

    @property
    def failures(self) -> float:
        """Mean number of failures."""
        return self.running_s / self.mtbf_s

    @property
    def waiting_s(self) -> float:
        """Mean time in which a node is missing: more are under repair than there are spares."""
        running_s = self.running_s
        if not self.hardware or not self.repair_s or running_s == inf:
            return 0.0
        load = self.hardware * self.repair_s / self.mtbf_s
        return self.repair_s * mean_wait(self.spares, load, running_s / self.repair_s)

    @property
    def wall_s(self) -> float:
        """Mean time from start to end."""
        return self.start_s + self.running_s + self.waiting_s

    @property
    def goodput(self) -> float:
        """Share of the time in which lasting steps are done."""
        return self.steps_s / self.wall_s

    @property
    def parts_s(self) -> dict[str, float]:
        """Mean time of each part. They sum to `wall_s`."""
        # A restart begins anew when a failure interrupts it, so it takes longer than `restart_s` on average.
        ended = self.failures * exp(-self.restart_s / self.mtbf_s)
        saves_s = self.save_s * self.work_s / self.interval_s
        return {
            "steps": self.steps_s,
            "evaluation": self.work_s - self.steps_s,
            "saves": saves_s,
            "lost work": ended * self.mtbf_s - self.work_s - saves_s,
            "restarts": ended * self.mtbf_s * expm1(self.restart_s / self.mtbf_s),
            "missing nodes": self.waiting_s,
            "start": self.start_s,
        }

    def at_best(self, step_s: float) -> "RunTiming":
        """Return the timing with the best interval between saves."""
        return replace(self, interval_s=best_interval(self.save_s, self.mtbf_s, self.write_s, step_s, self.work_s))

    def with_best_spares(self) -> "RunTiming":
        """Return the timing with the number of spare nodes that makes the run cheapest."""
        most = min(MOST_SPARES, max(1, self.nodes // MOST_SHARE))
        choices = (replace(self, spares=spares) for spares in range(most + 1))
        return min(choices, key=lambda choice: choice.wall_s * (self.nodes + choice.spares))

    def save_every(self, step_s: float) -> int:
        """Return `interval_s` in whole steps, rounded down: recipe.checkpoint_every."""
        return max(1, floor(self.interval_s / step_s * (1 + 1e-9)))

    def document(self, step_s: float) -> dict[str, Any]:
        """Return the figures in plain units."""
        return {
            "goodput": self.goodput, "wall_seconds": self.wall_s, "wall_seconds_by_part": self.parts_s,
            "failures": self.failures, "mtbf_seconds": self.mtbf_s, "checkpoint_every": self.save_every(step_s),
            "save_every_seconds": self.interval_s, "save_stall_seconds": self.save_s,
            "save_write_seconds": self.write_s, "spare_nodes": self.spares,
        }  # fmt: skip

    def advice(self, step_s: float, rate: str) -> str:
        """Return how often to save, and why. `rate`: where the failure rate is from."""
        every = self.save_every(step_s)
        notes = {"missing nodes": f" (a failed one is under repair for {duration(self.repair_s)})"}
        spent = [
            f"{name} {seconds / self.wall_s:.1%}{notes.get(name, '')}"
            for name, seconds in self.parts_s.items()
            if name != "steps" and seconds >= 5e-4 * self.wall_s
        ]
        best = self.with_best_spares()
        is_better = best.spares > self.spares and best.goodput >= self.goodput + 0.005
        spare = f"; with {many(best.spares, 'spare node')} {best.goodput:.1%}" if is_better else ""
        rare_s = rare_interval(self.save_s, self.mtbf_s)
        if self.interval_s >= self.work_s:
            why = "the run is shorter than any interval that pays"
        elif self.interval_s > rare_s * (1 + 1e-9):
            share = self.write_s / self.interval_s
            why = f"writing takes {duration(self.write_s)}, and is under way for {share:.0%} of the time"
            why = why if self.interval_s > step_s else "a step takes longer than the best interval"
        else:
            less = "a failure would cost more than an hour" if rare_s == HOUR_S else "more work would be lost"
            why = f"less often, {less}, and more often gains at most about {NEGLIGIBLE:.1%} of the time"
        return (
            f"Save every {many(every, 'step')} (recipe.checkpoint_every={every}, {duration(every * step_s)}): {why}; "
            f"a save stops training for {duration(self.save_s)}, and a failure comes every {duration(self.mtbf_s)} "
            f"({rate}). Goodput {self.goodput:.1%}{': ' if spent else ''}{', '.join(spent)}{spare}."
        )


def time_run(
    steps_s: float, step_s: float, devices: int, nodes: int, saves: Saves, conditions: Conditions
) -> RunTiming:
    """Return the timing with the best interval between saves and the cheapest number of spare nodes.

    `steps_s`: time of all its steps. `step_s`: of one of them; no run saves more often.
    """
    work_s = steps_s * (1 + conditions.evaluation)
    mtbf_s = conditions.mtbf_device_hours * HOUR_S / devices
    timing = RunTiming(
        work_s=work_s,
        steps_s=steps_s,
        start_s=conditions.restart_s,
        interval_s=best_interval(saves.stall_s, mtbf_s, saves.write_s, step_s, work_s),
        save_s=saves.stall_s,
        write_s=saves.write_s,
        restart_s=conditions.restart_s + saves.write_s,
        mtbf_s=mtbf_s,
        hardware=conditions.hardware,
        repair_s=conditions.repair_s,
        nodes=nodes,
        spares=conditions.spares or 0,
    )
    return timing if conditions.spares is not None else timing.with_best_spares()


RUNS = 200
MOST_EVENTS = 40_000
"""Failures that are simulated for one answer. A long run is simulated less often, at least FEWEST times."""
FEWEST = 20
ENDLESS_FAILURES = 1e6
"""Failures of a run beyond which it is taken to make no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRuns:
    """Statistics over all simulated runs."""

    wall_s: tuple[float, ...]
    """Seconds of each run, sorted."""
    failures: float
    """Mean number of failures."""
    steps_s: float

    def quantile_s(self, share: float) -> float:
        """Return the time that this share of the runs does not exceed."""
        return self.wall_s[min(len(self.wall_s) - 1, floor(share * len(self.wall_s)))]

    @property
    def goodput(self) -> float:
        """Share of the mean time in which lasting steps are done."""
        return self.steps_s / fmean(self.wall_s)


def simulate(timing: RunTiming, *, seed: int = 0, runs: int = 0) -> SimulatedRuns:
    """Simulate `runs` runs (0 = RUNS, fewer of a run with many failures)."""
    runs = runs or max(FEWEST, min(RUNS, int(MOST_EVENTS / max(1.0, timing.failures))))
    random = Random(seed)
    outcomes = [_SimulatedRun(timing, random).play() for _ in range(runs)]
    return SimulatedRuns(
        wall_s=tuple(sorted(wall_s for wall_s, _ in outcomes)), failures=fmean(number for _, number in outcomes),
        steps_s=timing.steps_s,
    )  # fmt: skip


class _SimulatedRun:
    def __init__(self, timing: RunTiming, random: Random) -> None:
        self.timing, self.random = timing, random
        self.now_s, self.done_s, self.failures = timing.start_s, 0.0, 0
        """Time since the start, work that is saved, and failures so far."""
        self.returns_s: list[float] = []
        """Times at which nodes under repair come back, a heap."""
        self.spares = timing.spares

    def play(self) -> tuple[float, int]:
        """Return the seconds and the failures of the run. Infinite seconds = it makes no progress."""
        while self.failures < ENDLESS_FAILURES:
            left_s = max(0.0, self.timing.work_s - self.done_s)
            # Each interval ends with a save.
            needed_s = left_s + self.timing.save_s * left_s / self.timing.interval_s
            until_s = self.random.expovariate(1 / self.timing.mtbf_s)
            if until_s >= needed_s:
                return self.now_s + needed_s, self.failures
            self.now_s += until_s
            # A checkpoint whose write has not ended at the failure does not count.
            saved = (until_s - self.timing.write_s) / (self.timing.interval_s + self.timing.save_s)
            self.done_s += max(0, floor(saved)) * self.timing.interval_s
            self._fail()
            # A failure during a restart begins it anew.
            while (until_s := self.random.expovariate(1 / self.timing.mtbf_s)) < self.timing.restart_s:
                self.now_s += until_s
                self._fail()
            self.now_s += self.timing.restart_s
        return float("inf"), self.failures

    def _fail(self) -> None:
        """Handle one failure: a spare takes over, or the first node that is repaired."""
        self.failures += 1
        # Software failures keep their nodes, so nothing is replaced.
        if self.random.random() >= self.timing.hardware:
            return
        while self.returns_s and self.returns_s[0] <= self.now_s:
            heappop(self.returns_s)
            self.spares += 1
        heappush(self.returns_s, self.now_s + self.random.expovariate(1 / self.timing.repair_s))
        if self.spares:
            self.spares -= 1
        else:
            # No spare is left: the run waits for the first node that is repaired.
            self.now_s = max(self.now_s, heappop(self.returns_s))
