"""Seconds of contestants that take turns, each run with inputs that no cache holds."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu.case import Case, InputSet, Run, gradients, inputs
from benchmarks.gpu.errors import reason

LEAST_ROUNDS, MOST_ROUNDS = 5, 60
MOST_SETS = 24
CACHES = 2.5
"""Times the last-level cache that all sets of inputs hold together."""
CYCLES_PER_S = 2.0e9
"""At most, of a GPU's clock: a wait of so many cycles is never shorter than asked for."""
LONGEST_WAIT_S = 0.02


class HostTimer:
    """Of a CPU, whose work is done when a call returns."""

    cache_bytes = 0

    def mark(self) -> int:
        """Now."""
        return time.perf_counter_ns()

    def seconds(self, start: int, end: int) -> float:
        """Between two marks."""
        return (end - start) / 1e9

    def settle(self) -> None:
        """Nothing to wait for."""

    def wait(self, seconds: float) -> None:
        """The host is never ahead of itself."""

    def release(self) -> None:
        """Nothing is kept for later."""

    def peak_bytes(self, run: Callable[[], object]) -> int | None:
        """What a run takes beside what was there; a CPU does not say."""
        run()
        return None


class DeviceTimer:
    """Of a GPU: events on its stream. Before a run the device waits until the host has launched all of it, so that
    what is timed is the device and not Python."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)

    def mark(self) -> Any:
        """An event behind all that was started."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two events that have happened."""
        return float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Until the device has done everything."""
        torch.cuda.synchronize(self.device)

    def wait(self, seconds: float) -> None:
        """The device does nothing for about so long."""
        torch.cuda._sleep(int(min(seconds, LONGEST_WAIT_S) * CYCLES_PER_S))

    def release(self) -> None:
        """What no tensor needs any more goes back to the device."""
        gc.collect()
        torch.cuda.empty_cache()

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """What live tensors took at most, beside those that were there."""
        self.settle()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        self.settle()
        return int(torch.cuda.max_memory_allocated(self.device)) - before


Timer = HostTimer | DeviceTimer


def timer_of(device: torch.device) -> Timer:
    """That of a device."""
    return DeviceTimer(device) if device.type == "cuda" else HostTimer()


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds: the median, and between which eight of ten runs were."""

    median: float
    low: float
    high: float

    @staticmethod
    def from_times(seconds: list[float]) -> "Spread":
        """Of at least two runs."""
        tenths = statistics.quantiles(seconds, n=10, method="inclusive")
        return Spread(statistics.median(seconds), tenths[0], tenths[8])


def once(run: Run, input_set: InputSet, timer: Timer, learns: bool, wait_s: float = 0.0) -> dict[str, tuple[Any, Any]]:
    """A run: of each pass the marks around it."""
    timer.wait(wait_s)
    begin = timer.mark()
    results = run(*input_set.leaves)
    middle = timer.mark()
    if not learns:
        return {"forward": (begin, middle)}
    leaf_gradients = gradients(results, input_set)
    end = timer.mark()
    del results, leaf_gradients
    return {"forward": (begin, middle), "backward": (middle, end), "full": (begin, end)}


def input_sets(case: Case, device: torch.device, cache_bytes: int) -> list[InputSet]:
    """As many as no cache holds together, two at least: each run then reads its inputs from memory."""
    first = inputs(case, device)
    number = int(CACHES * cache_bytes // max(1, first.bytes_held)) + 1
    return [first, *(inputs(case, device, seed) for seed in range(1, max(2, min(MOST_SETS, number))))]


@dataclass(slots=True)
class _Contestant:
    """Who takes turns."""

    run: Run
    wait_s: float
    """So long the host needs to launch it."""
    passes: dict[str, list[float]]


def measured(
    case: Case, runs: dict[str, Run], sets: list[InputSet], timer: Timer, seconds: float, late: Callable[[], bool]
) -> dict[str, dict[str, Any]]:
    """Of each contestant spreads by pass, rounds and peak bytes, or why it failed. `late`: whether to take no more."""
    figures: dict[str, dict[str, Any]] = {}
    racing: dict[str, _Contestant] = {}
    for name, run in runs.items():
        if late():
            figures[name] = {"left_out": "no time left"}
            continue
        try:
            figures[name], racing[name] = _warmed(case, run, sets[0], timer)
        except Exception as failure:  # rivals fail in many ways, and memory may not be enough
            figures[name] = {"failed": reason(failure)}
        if "failed" in figures[name]:
            timer.release()  # not before the exception is gone, which holds what filled the memory
    rounds = _race(case, racing, sets, timer, seconds)
    for name, contestant in racing.items():
        figures[name]["rounds"] = rounds
        figures[name]["seconds"] = {part: asdict(Spread.from_times(times)) for part, times in contestant.passes.items()}
    return figures


def _warmed(case: Case, run: Run, input_set: InputSet, timer: Timer) -> tuple[dict[str, Any], _Contestant]:
    """Compiled, chosen and allocated; then how long the host takes, and the peak."""
    for _ in range(2):
        once(run, input_set, timer, case.learns)
        timer.settle()
    start = time.perf_counter()
    once(run, input_set, timer, case.learns)
    host_s = time.perf_counter() - start
    timer.settle()
    peak = timer.peak_bytes(lambda: once(run, input_set, timer, case.learns))
    return {"peak_bytes": peak, "host_seconds": host_s}, _Contestant(run, 1.3 * host_s, {})


def _race(case: Case, racing: dict[str, _Contestant], sets: list[InputSet], timer: Timer, seconds: float) -> int:
    """Rounds in which each runs once, on other inputs than the one before it; who begins changes."""
    names, rounds, turn, started = list(racing), 0, 0, time.perf_counter()
    while names and rounds < MOST_ROUNDS and (rounds < LEAST_ROUNDS or time.perf_counter() - started < seconds):
        names = names[1:] + names[:1]
        marks = {}
        for name in names:
            contestant, turn = racing[name], turn + 1
            marks[name] = once(contestant.run, sets[turn % len(sets)], timer, case.learns, contestant.wait_s)
        timer.settle()
        for name, parts in marks.items():
            for part, (begin, end) in parts.items():
                racing[name].passes.setdefault(part, []).append(timer.seconds(begin, end))
        rounds += 1
    return rounds
