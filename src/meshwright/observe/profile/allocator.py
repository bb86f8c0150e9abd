"""Memory over time by the allocator itself, independent of `observe.dryrun.storage_tracker`.

On a CPU the source is torch's profiler, which also sees memory that operations take and return inside. It misses frees
on other threads, such as Gloo's, which drop the last reference to sent tensors. An address that is allocated again was
free before, so such frees are noticed then. The others make the figure too high, never too low.

On a GPU the sources are the caching allocator's statistics, read whenever a part of the program begins,
and its history of events for the curve between. Next to it is the memory that the process (CPU: resident, libraries
included) or the allocator (GPU) holds.
"""

import time
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import time_ns
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from meshwright import compat
from meshwright.observe.dryrun.storage_tracker import ROUNDING_BYTES
from meshwright.observe.spans import Inner, replaced
from meshwright.training.device import memory

PAUSE_S = 0.001
"""Pause after a wait for a collective, in which Gloo's thread drops its tensors."""
Event = tuple[int, int, int]
"""(ns, address, bytes; negative where memory is freed)."""
POINTS = 1000
"""Most points of a curve. Each is the highest of its interval of time."""
EVENTS = 500_000
"""Most events of a GPU's allocator that are kept; they take at most some 350 MB of host memory."""
Point = tuple[int, int]
"""(ns since 1970, bytes allocated then)."""
CHANGES = {"alloc": (1, 1), "free_requested": (-1, 0), "free_completed": (0, -1)}
"""Effect of an event on allocated and on active bytes."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of the program: its peak of allocated bytes, and the bytes reserved at its end."""

    name: str
    allocated_bytes: int
    reserved_bytes: int
    active_bytes: int | None = None
    """GPU: peak including freed memory that another stream still used."""
    inactive_split_bytes: int | None = None
    """GPU: peak of free pieces of segments that are otherwise in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorAccount:
    """Everything that a recorder has seen."""

    peak_bytes: int
    reserved_bytes: int
    stretches: tuple[Stretch, ...]
    curve: tuple[tuple[float, int], ...]
    """(seconds since the start, allocated bytes)."""
    active_bytes: int | None = None
    inactive_split_bytes: int | None = None
    """Peaks on a GPU, as in a Stretch. Without statistics they come from its history, the second as of the end."""
    events: int = 0
    """Allocator events of which the curve is made. 0 = of a GPU only one point per part is known."""


class HostAllocationRecorder:
    """Recorder of a CPU's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []
        self.held: list[int] = []
        self.begins: list[int] = []
        self._watching = watching()

    def __enter__(self) -> "HostAllocationRecorder":
        self.allocations = self._watching.__enter__()
        self.begin("start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.begin("end")
        self._watching.__exit__(kind, error, trace)

    def begin(self, name: str) -> None:
        """Record the moment. The allocator's events are matched with it afterwards."""
        self.held.append(memory(self.device).allocated_bytes)
        self.names.append(name)
        self.begins.append(time_ns())

    def account(self) -> AllocatorAccount:
        """Sum the events. A part begins with what the one before it left."""
        # Both clocks count nanoseconds since 1970, so events can be assigned to parts afterwards.
        points = list(self.allocations.totals())
        highest, index, total = [0] * len(self.names), 0, 0
        for at, size in points:
            while index + 1 < len(self.begins) and self.begins[index + 1] <= at:
                index += 1
                highest[index] = total
            total = size
            highest[index] = max(highest[index], total)
        highest[index + 1 :] = [total] * len(highest[index + 1 :])
        return AllocatorAccount(
            peak_bytes=max(highest),
            reserved_bytes=max(self.held),
            stretches=tuple(
                Stretch(name=name, allocated_bytes=size, reserved_bytes=held)
                for name, size, held in zip(self.names[:-1], highest, self.held[1:], strict=False)
            ),
            curve=thin_curve([((at - self.begins[0]) / 1e9, size) for at, size in points]),
            events=len(points),
        )


class DeviceAllocationRecorder:
    """Recorder of a GPU's memory. The allocator acts on the host, so nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stretches: list[Stretch] = []
        self.readings: list[tuple[int, int]] = []
        self.name, self.started = "start", 0
        self.history: History | None = None

    def __enter__(self) -> "DeviceAllocationRecorder":
        # Segments of an earlier program would count as reserved by this one.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.started = time_ns()
        self._recording = compat.record_allocations(EVENTS)
        return self

    def __exit__(self, *_: Any) -> None:
        self.begin("end")
        snapshot = compat.stop_recording_allocations() if self._recording else None
        if snapshot is not None:
            self.history = read_history(snapshot, self.device.index or 0, ROUNDING_BYTES["cuda"])

    def begin(self, name: str) -> None:
        """Read the peaks since the last call."""
        use, statistics = memory(self.device), torch.cuda.memory_stats(self.device)
        self.stretches.append(
            Stretch(
                name=self.name,
                allocated_bytes=use.allocated_bytes,
                reserved_bytes=use.reserved_bytes,
                active_bytes=statistics.get("active_bytes.all.peak"),
                inactive_split_bytes=statistics.get("inactive_split_bytes.all.peak"),
            )
        )
        self.readings.append((time_ns(), use.allocated_bytes))
        self.name = name
        torch.cuda.reset_peak_memory_stats(self.device)

    def account(self) -> AllocatorAccount:
        """Return what was read. The curve holds the events, and readings before the first retained event."""
        history = self.history
        events = history.allocated if history else ()
        before = [point for point in self.readings if not events or point[0] < events[0][0]]
        active = [stretch.active_bytes for stretch in self.stretches if stretch.active_bytes is not None]
        split = [stretch.inactive_split_bytes for stretch in self.stretches if stretch.inactive_split_bytes is not None]
        return AllocatorAccount(
            peak_bytes=max(stretch.allocated_bytes for stretch in self.stretches),
            reserved_bytes=max(stretch.reserved_bytes for stretch in self.stretches),
            stretches=tuple(self.stretches),
            curve=thin_curve([((at - self.started) / 1e9, size) for at, size in (*before, *events)]),
            active_bytes=max(active, default=history.active_peak_bytes if history else None),
            inactive_split_bytes=max(split, default=history.inactive_split_bytes if history else None),
            events=len(events),
        )


def recorder_of(device: torch.device) -> HostAllocationRecorder | DeviceAllocationRecorder:
    """Return the recorder of a kind of device, to be entered before anything is built."""
    return DeviceAllocationRecorder(device) if device.type == "cuda" else HostAllocationRecorder(device)


def thin_curve(points: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Return at most POINTS points: the highest of each interval of time, so that no peak is lost."""
    if len(points) <= POINTS:
        return tuple(points)
    width = (points[-1][0] - points[0][0]) / POINTS or 1.0
    best: dict[int, tuple[float, int]] = {}
    for point in points:
        stretch = min(POINTS - 1, int((point[0] - points[0][0]) / width))
        if stretch not in best or point[1] > best[stretch][1]:
            best[stretch] = point
    return tuple(best.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Events of one device in a snapshot."""

    allocated: tuple[Point, ...]
    """Points after each event. Empty = nothing happened."""
    active_peak_bytes: int
    """Peak of memory that was allocated, or freed but still in use on another stream."""
    inactive_split_bytes: int
    """Free pieces, at the end, of segments in use: of no use to a larger request."""


def read_history(snapshot: Mapping[str, Any], device: int, round_bytes: int) -> History | None:
    """Read the history of a device from a snapshot of torch.cuda.memory._snapshot.

    It holds the last events in order and the present blocks. Levels are computed backwards from the blocks, so they are
    right even if the beginning was dropped. Sizes are those requested, in multiples of the allocator's granularity. A
    block whose rest was too small to split off counts a little more in the allocator's own statistics.

    Returns None when the snapshot has another form than documented for this torch.
    """
    try:
        blocks = [
            (block["state"], _rounded(block.get("requested_size", block["size"]), round_bytes))
            for segment in _segments(snapshot, device)
            for block in segment["blocks"]
        ]
        allocated = sum(size for state, size in blocks if state == "active_allocated")
        active = sum(size for state, size in blocks if state != "inactive")
        entries = [entry for entry in snapshot["device_traces"][device] if entry["action"] in CHANGES]
        return History(
            allocated=tuple(_levels(entries, allocated, 0, round_bytes)),
            active_peak_bytes=max((size for _, size in _levels(entries, active, 1, round_bytes)), default=active),
            inactive_split_bytes=sum(
                _free_in_split_segments(segment["blocks"]) for segment in _segments(snapshot, device)
            ),
        )
    # The snapshot is no public interface. A profile without a curve is better than none.
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        return None


def _segments(snapshot: Mapping[str, Any], device: int) -> Iterator[Mapping[str, Any]]:
    return (segment for segment in snapshot["segments"] if segment.get("device", device) == device)


def _levels(entries: list[Any], end_bytes: int, which: int, round_bytes: int) -> list[Point]:
    """Return (ns, bytes after it) of every event that changes the quantity, from its level at the end."""
    # Events of several threads may be slightly out of order. A moment is never later than the one after it.
    level, latest, points = end_bytes, entries[-1]["time_us"] * 1000 if entries else 0, []
    for entry in reversed(entries):
        sign = CHANGES[entry["action"]][which]
        latest = min(latest, entry["time_us"] * 1000)
        if sign:
            points.append((latest, level))
            level -= sign * _rounded(entry["size"], round_bytes)
    return points[::-1]


def _free_in_split_segments(blocks: list[Any]) -> int:
    free = sum(block["size"] for block in blocks if block["state"] == "inactive")
    return free if any(block["state"] != "inactive" for block in blocks) else 0


def _rounded(size: int, round_bytes: int) -> int:
    return -(-size // round_bytes) * round_bytes
