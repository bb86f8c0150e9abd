"""Moments of a rank's program, and the clocks of all ranks laid over each other."""

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

Mark = Any
"""A moment as its clock keeps it: nanoseconds of the host, or an event on a GPU's stream."""
ROUNDS = 16
"""Questions a rank asks the first one; the quickest answer counts."""


class Clock(Protocol):
    """Keeps moments of the work that a rank has started."""

    def mark(self) -> Mark:
        """Now: where the work that was started so far ends."""
        ...

    def seconds(self, mark: Mark) -> float:
        """A moment, after `settle`."""
        ...

    def settle(self) -> None:
        """Wait until all marks can be read."""
        ...

    @property
    def computes_here(self) -> bool:
        """Whether what is started now is in line with what computes."""
        ...


class HostClock:
    """Of a CPU, whose work is done when a call returns."""

    computes_here = True

    def mark(self) -> int:
        """Nanoseconds."""
        return time.perf_counter_ns()

    def seconds(self, mark: int) -> float:
        """Since some moment of this machine."""
        return mark / 1e9

    def settle(self) -> None:
        """Nothing to wait for."""


class DeviceClock:
    """Of a GPU, which works later than the host asks it to: events on the stream that computes."""

    def __init__(self) -> None:
        self.stream = torch.cuda.current_stream()
        torch.cuda.synchronize()
        self._base = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._base.record()
        self._base.synchronize()
        self._base_s = time.perf_counter()

    @property
    def computes_here(self) -> bool:
        """FSDP starts its collectives on streams of their own."""
        return bool(torch.cuda.current_stream() == self.stream)

    def mark(self) -> torch.cuda.Event:
        """An event behind all that was started on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """On the host's clock."""
        return self._base_s + float(self._base.elapsed_time(mark)) / 1e3

    def settle(self) -> None:
        """Until the device has done everything."""
        torch.cuda.synchronize()


def clock_of(device: torch.device) -> Clock:
    """The clock of a kind of device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """What is added to this rank's seconds to have the first rank's, and how wrong that can be."""

    seconds: float = 0.0
    residual_s: float = 0.0
    """Half of the quickest question and answer: the answer was given at some moment between."""


def align(rank: int, world: int) -> Offset:
    """Ask the first rank what time it is (Cristian 1989); every rank of the world calls this at the same place."""
    if world == 1:
        return Offset()
    dist.barrier()
    told = torch.zeros((), dtype=torch.int64)
    if rank:
        return min((_asked(told) for _ in range(ROUNDS)), key=lambda one: one.residual_s)
    for other in range(1, world):
        for _ in range(ROUNDS):
            dist.recv(told, other)
            dist.send(told.fill_(time.perf_counter_ns()), other)
    return Offset()


def _asked(told: torch.Tensor) -> Offset:
    before = time.perf_counter_ns()
    dist.send(told, 0)
    dist.recv(told, 0)
    after = time.perf_counter_ns()
    return Offset(seconds=(told.item() - (before + after) / 2) / 1e9, residual_s=(after - before) / 2e9)
