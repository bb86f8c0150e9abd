"""Moments of a rank's program, and the clocks of all ranks laid over each other."""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Mark = Any
"""A moment as its clock keeps it: nanoseconds of the host, or an event on a GPU's stream."""
ROUNDS = 16
"""Questions a rank asks the first one; the quickest answer counts."""


class HostClock:
    """Of a CPU, whose work is done when a call returns."""

    computes_here = True
    """Whether what is started now is in line with what computes."""
    residual_s = 0.0
    """How wrong its seconds can be as those of the host's clock, after `settle`."""

    def mark(self) -> int:
        """Nanoseconds."""
        return time.perf_counter_ns()

    def seconds(self, mark: Mark) -> float:
        """Since some moment of this machine."""
        return float(mark) / 1e9

    def settle(self) -> None:
        """Nothing to wait for."""


class DeviceClock:
    """Of a GPU, which works later than the host asks it to: events on the stream that computes. The host's time is told
    from two of them, at the beginning and when it settles, since the two clocks do not run equally fast."""

    def __init__(self) -> None:
        self.stream = torch.cuda.current_stream()
        torch.cuda.synchronize()
        self._first = self._anchor()
        self._rate = 1.0
        self.residual_s = self._first.residual_s

    @property
    def computes_here(self) -> bool:
        """FSDP starts its collectives on streams of their own."""
        return bool(torch.cuda.current_stream() == self.stream)

    def mark(self) -> torch.cuda.Event:
        """An event behind all that was started on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        """On the host's clock."""
        return self._first.at_s + self._rate * float(self._first.event.elapsed_time(mark)) / 1e3

    def settle(self) -> None:
        """Until the device has done everything."""
        torch.cuda.synchronize()
        last = self._anchor()
        between_s = float(self._first.event.elapsed_time(last.event)) / 1e3
        if between_s > 0:
            self._rate = (last.at_s - self._first.at_s) / between_s
            self.residual_s = max(self._first.residual_s, last.residual_s)

    def _anchor(self) -> "_Anchor":
        """An event of an idle device, which happened between two looks at the host's clock; the quickest of some."""
        return min((self._looked() for _ in range(ROUNDS)), key=lambda one: one.residual_s)

    def _looked(self) -> "_Anchor":
        before = time.perf_counter()
        event = self.mark()
        event.synchronize()
        after = time.perf_counter()
        return _Anchor(event=event, at_s=(before + after) / 2, residual_s=(after - before) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Anchor:
    event: torch.cuda.Event
    at_s: float
    residual_s: float


Clock = HostClock | DeviceClock
"""Keeps moments of the work that a rank has started: `mark` is one, of which `seconds` tells after `settle`."""


def clock_of(device: torch.device) -> Clock:
    """The clock of a kind of device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """What is added to this rank's seconds to have the first rank's, and how wrong that can be."""

    seconds: float = 0.0
    residual_s: float = 0.0
    """Half of the quickest question and answer: the answer was given at some moment between."""
    at_s: float = 0.0
    """When, on this rank's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """A rank's clock laid over the first one's from before to after what was timed: crystals drift apart by millionths,
    in a minute by more than the offset is uncertain."""

    first: Offset = Offset()
    last: Offset = Offset()
    device_residual_s: float = 0.0
    """Of a GPU's clock against its host's."""

    def seconds(self, own_s: float) -> float:
        """On the first rank's clock, the offset on the straight line between the two."""
        between_s = self.last.at_s - self.first.at_s
        share = (own_s - self.first.at_s) / between_s if between_s > 0 else 0.0
        return own_s + self.first.seconds + share * self.drift_s

    @property
    def drift_s(self) -> float:
        """How far the two clocks came apart meanwhile."""
        return self.last.seconds - self.first.seconds

    @property
    def residual_s(self) -> float:
        """How wrong a moment between can be."""
        return max(self.first.residual_s, self.last.residual_s) + self.device_residual_s


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
    middle = (before + after) / 2
    return Offset(seconds=(told.item() - middle) / 1e9, residual_s=(after - before) / 2e9, at_s=middle / 1e9)
