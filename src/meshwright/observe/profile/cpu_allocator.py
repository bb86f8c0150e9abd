"""Memory that a process on a CPU has allocated, by torch's allocator, independent of the dry run.

torch's profiler sees every allocation. It misses frees on other threads, such as Gloo's, which drop the last reference
to sent tensors. An address that is allocated again was free before, so such frees are found then. Those not found yet
make the figure too high, never too low.
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
"""(ns, address, bytes; negative where memory is freed)."""


@dataclass(slots=True)
class AllocationRecorder:
    """Allocations inside `watching`, to be read afterwards."""

    events: list[Event] = field(default_factory=list)

    def totals(self) -> Iterator[tuple[int, int]]:
        """Yield (ns, allocated bytes) after every event."""
        return totals(self.events)


@contextmanager
def patient() -> Iterator[None]:
    """Make waits for collectives pause briefly inside.

    Gloo's threads then release sent tensors first. The last release happens on this thread, where the profiler sees it.
    """

    def wait(inner: Inner, *arguments: object) -> bool:
        done: bool = inner(*arguments)
        time.sleep(PAUSE_S)
        return done

    with replaced(dist.Work, "wait", wait):
        yield


@contextmanager
def watching() -> Iterator[AllocationRecorder]:
    """Record this process's allocations by torch's profiler inside."""
    recorder = AllocationRecorder()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield recorder
    recorder.events = sorted(compat.profiled_allocations(profiler))


def totals(events: Iterable[Event]) -> Iterator[tuple[int, int]]:
    """Yield (ns, bytes) after each event in order of time. Memory that overlaps a new allocation had been freed."""
    held: dict[int, int] = {}
    addresses: list[int] = []
    total = 0

    def end(address: int) -> int:
        del addresses[bisect_right(addresses, address) - 1]
        return held.pop(address)

    for at, address, size in events:
        if size < 0:
            total -= end(address) if address in held else 0
        else:
            before = bisect_right(addresses, address) - 1
            first = before if before >= 0 and addresses[before] + held[addresses[before]] > address else before + 1
            while first < len(addresses) and addresses[first] < address + size:
                total -= end(addresses[first])
            insort(addresses, address)
            held[address] = size
            total += size
        yield at, total
