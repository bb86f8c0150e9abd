"""What the allocator itself says of memory over time: it knows nothing of `observe.dryrun.storage_tracker`.

On a CPU it is torch's profiler (observe.profile.cpu_allocator), which also hears of what operations take and give back
inside. On a GPU it is the caching allocator's own statistics, read whenever a part of the program begins, and its
history of events (observe.profile.gpu_allocator) for the curve between. Beside it stands what the process (CPU:
resident, libraries and all) or the allocator (GPU) holds.
"""

from dataclasses import dataclass
from time import time_ns
from types import TracebackType
from typing import Any

import torch

from meshwright import compat
from meshwright.observe.dryrun.storage_tracker import ROUNDING_BYTES
from meshwright.observe.profile.cpu_allocator import watching
from meshwright.observe.profile.gpu_allocator import History, history
from meshwright.training.device import memory

POINTS = 1000
"""Of a curve: of each of so many stretches of time, the highest one."""
EVENTS = 500_000
"""Of a GPU's allocator that are kept: at the end some 350 MB of the host's memory at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of the program: the most it had allocated, and what was held for it at its end."""

    name: str
    allocated_bytes: int
    reserved_bytes: int
    active_bytes: int | None = None
    """GPU: with what was given back and another stream still used."""
    inactive_split_bytes: int | None = None
    """GPU: the most that lay free in pieces of segments otherwise in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorAccount:
    """All that a recorder has seen."""

    peak_bytes: int
    reserved_bytes: int
    stretches: tuple[Stretch, ...]
    curve: tuple[tuple[float, int], ...]
    """(seconds since the start, allocated bytes)."""
    active_bytes: int | None = None
    inactive_split_bytes: int | None = None
    """The most of a GPU's, as in a Stretch; without statistics of them by its history: the second as of the end."""
    events: int = 0
    """Of the allocator, from which the curve was made; 0 = of a GPU only a point for each part is known."""


class HostAllocationRecorder:
    """Of a CPU's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names: list[str] = []
        self.held: list[int] = []
        self.begins: list[int] = []
        self._watching = watching()

    def __enter__(self) -> "HostAllocationRecorder":
        self.heard = self._watching.__enter__()
        self.begin("start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.begin("end")
        self._watching.__exit__(kind, error, trace)

    def begin(self, name: str) -> None:
        """Notes the moment; the allocator's events are laid beside it afterwards."""
        self.held.append(memory(self.device).allocated_bytes)
        self.names.append(name)
        self.begins.append(time_ns())

    def account(self) -> AllocatorAccount:
        """Adds the events up. A part begins with what the one before it left."""
        points = list(self.heard.totals())
        most, place, total = [0] * len(self.names), 0, 0
        for at, size in points:
            while place + 1 < len(self.begins) and self.begins[place + 1] <= at:
                place += 1
                most[place] = total
            total = size
            most[place] = max(most[place], total)
        most[place + 1 :] = [total] * len(most[place + 1 :])
        return AllocatorAccount(
            peak_bytes=max(most),
            reserved_bytes=max(self.held),
            stretches=tuple(
                Stretch(name=name, allocated_bytes=size, reserved_bytes=held)
                for name, size, held in zip(self.names[:-1], most, self.held[1:], strict=False)
            ),
            curve=thinned([((at - self.begins[0]) / 1e9, size) for at, size in points]),
            events=len(points),
        )


class DeviceAllocationRecorder:
    """Of a GPU's memory. Its allocator works when the host asks it to, so that no waiting for the device is needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stretches: list[Stretch] = []
        self.readings: list[tuple[int, int]] = []
        self.name, self.started = "start", 0
        self.history: History | None = None

    def __enter__(self) -> "DeviceAllocationRecorder":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.started = time_ns()
        self._recording = compat.record_allocations(EVENTS)
        return self

    def __exit__(self, *_: Any) -> None:
        self.begin("end")
        told = compat.recorded_allocations() if self._recording else None
        if told is not None:
            self.history = history(told, self.device.index or 0, ROUNDING_BYTES["cuda"])

    def begin(self, name: str) -> None:
        """Reads the peaks since the last time."""
        use, all_of_it = memory(self.device), torch.cuda.memory_stats(self.device)
        self.stretches.append(
            Stretch(
                name=self.name,
                allocated_bytes=use.allocated_bytes,
                reserved_bytes=use.reserved_bytes,
                active_bytes=all_of_it.get("active_bytes.all.peak"),
                inactive_split_bytes=all_of_it.get("inactive_split_bytes.all.peak"),
            )
        )
        self.readings.append((time_ns(), use.allocated_bytes))
        self.name = name
        torch.cuda.reset_peak_memory_stats(self.device)

    def account(self) -> AllocatorAccount:
        """What was read. The curve is that of the events, with the readings for what came before the first one kept."""
        told = self.history
        events = told.allocated if told else ()
        before = [point for point in self.readings if not events or point[0] < events[0][0]]
        active = [one.active_bytes for one in self.stretches if one.active_bytes is not None]
        split = [one.inactive_split_bytes for one in self.stretches if one.inactive_split_bytes is not None]
        return AllocatorAccount(
            peak_bytes=max(one.allocated_bytes for one in self.stretches),
            reserved_bytes=max(one.reserved_bytes for one in self.stretches),
            stretches=tuple(self.stretches),
            curve=thinned([((at - self.started) / 1e9, size) for at, size in (*before, *events)]),
            active_bytes=max(active, default=told.active_peak_bytes if told else None),
            inactive_split_bytes=max(split, default=told.inactive_split_bytes if told else None),
            events=len(events),
        )


def recorder_of(device: torch.device) -> HostAllocationRecorder | DeviceAllocationRecorder:
    """The one that a kind of device has, to be entered before anything is built."""
    return DeviceAllocationRecorder(device) if device.type == "cuda" else HostAllocationRecorder(device)


def thinned(points: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """At most POINTS of a curve: of each stretch of time the highest point, so that no peak is lost."""
    if len(points) <= POINTS:
        return tuple(points)
    width = (points[-1][0] - points[0][0]) / POINTS or 1.0
    best: dict[int, tuple[float, int]] = {}
    for point in points:
        place = min(POINTS - 1, int((point[0] - points[0][0]) / width))
        if place not in best or point[1] > best[place][1]:
            best[place] = point
    return tuple(best.values())
