"""How much a process on a CPU has allocated, told by torch's allocator itself: nothing that the dry run knows of.

torch's profiler hears of every allocation, but of those that end on another thread (Gloo's, which drop the last hold on
what they sent) it does not hear the end. An address that is given out again was free before: what is found so is taken
back. What is not found yet makes the figure too high, never too low.
"""

import time
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from meshwright import compat
from meshwright.observe.spans import Inner, replaced

PAUSE_S = 0.001
Event = tuple[int, int, int]
"""(ns, address, bytes: below 0 where memory ends)."""


@dataclass(slots=True)
class AllocationRecorder:
    """What was allocated while `watching`; read it afterwards."""

    events: list[Event] = field(default_factory=list)

    def totals(self) -> Iterator[tuple[int, int]]:
        """(ns, bytes allocated then), after every event."""
        return totals(self.events)


@contextmanager
def patient() -> Iterator[None]:
    """Inside, whoever waits for a collective gives Gloo's threads a moment to let go of what was sent, so that it is
    this thread that lets go of it last, and the profiler hears of it."""

    def wait(inner: Inner, *given: object) -> bool:
        done: bool = inner(*given)
        time.sleep(PAUSE_S)
        return done

    with replaced(dist.Work, "wait", wait):
        yield


@contextmanager
def watching() -> Iterator[AllocationRecorder]:
    """Have torch's profiler listen to this process's allocations."""
    found = AllocationRecorder()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as listening:
        yield found
    found.events = sorted(compat.profiled_allocations(listening))


def totals(events: Iterable[Event]) -> Iterator[tuple[int, int]]:
    """(ns, bytes) after each event in order of time; memory that overlaps what is given out anew had ended."""
    held: dict[int, int] = {}
    places: list[int] = []
    total = 0

    def end(address: int) -> int:
        del places[bisect_right(places, address) - 1]
        return held.pop(address)

    for at, address, size in events:
        if size < 0:
            total -= end(address) if address in held else 0
        else:
            before = bisect_right(places, address) - 1
            first = before if before >= 0 and places[before] + held[places[before]] > address else before + 1
            while first < len(places) and places[first] < address + size:
                total -= end(places[first])
            insort(places, address)
            held[address] = size
            total += size
        yield at, total
