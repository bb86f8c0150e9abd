"""Moments of a rank's program, and the alignment of all ranks' clocks."""

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
    """Clock of a CPU, whose work is done when a call returns."""

    computes_here = True
    """True: calls run in line with the computation."""
    residual_s = 0.0
    """Uncertainty of its seconds against the host's clock, after `settle`."""

    def mark(self) -> int:
        """Return the present moment in nanoseconds."""
        return time.perf_counter_ns()

    def seconds(self, mark: Mark) -> float:
        """Return seconds since a fixed moment of this machine."""
        return float(mark) / 1e9

    def settle(self) -> None:
        """Do nothing: there is nothing to wait for."""


class DeviceClock:
    """Clock of a GPU, which works later than the host asks it to: events on the computing stream.

    The host's time is derived from two events, at the beginning and when it settles, since the clocks run at different
    speeds.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.current_stream()
        torch.cuda.synchronize()
        self._first = self._anchor()
        self._rate = 1.0
        self.residual_s = self._first.residual_s

    @property
    def computes_here(self) -> bool:
        """False on other streams, on which FSDP starts its collectives."""
        return bool(torch.cuda.current_stream() == self.stream)

    def mark(self) -> torch.cuda.Event:
        """Return an event behind all work of the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        """Return seconds on the host's clock."""
        return self._first.at_s + self._rate * float(self._first.event.elapsed_time(mark)) / 1e3

    def settle(self) -> None:
        """Wait until the device has finished, and calibrate its speed."""
        torch.cuda.synchronize()
        last = self._anchor()
        between_s = float(self._first.event.elapsed_time(last.event)) / 1e3
        if between_s > 0:
            self._rate = (last.at_s - self._first.at_s) / between_s
            self.residual_s = max(self._first.residual_s, last.residual_s)

    def _anchor(self) -> "_Anchor":
        """Return an event of an idle device between two readings of the host's clock; the quickest of ROUNDS."""
        return min((self._measure_anchor() for _ in range(ROUNDS)), key=lambda anchor: anchor.residual_s)

    def _measure_anchor(self) -> "_Anchor":
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
"""Records moments of a rank's work: `mark` returns one, and `seconds` converts it after `settle`."""


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a kind of device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """Seconds to add to this rank's clock to get the first rank's, and their uncertainty."""

    seconds: float = 0.0
    residual_s: float = 0.0
    """Half the time of the quickest question and answer: the answer came at some moment between."""
    at_s: float = 0.0
    """Moment of the measurement on this rank's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """A rank's clock aligned before and after the timed steps: crystals drift apart by millionths."""

    first: Offset = Offset()
    last: Offset = Offset()
    device_residual_s: float = 0.0
    """Uncertainty of a GPU's clock against its host's."""

    def seconds(self, rank_s: float) -> float:
        """Convert to the first rank's clock, by the straight line between the two offsets."""
        between_s = self.last.at_s - self.first.at_s
        share = (rank_s - self.first.at_s) / between_s if between_s > 0 else 0.0
        return rank_s + self.first.seconds + share * self.drift_s

    @property
    def drift_s(self) -> float:
        """Seconds by which the two clocks drifted apart."""
        return self.last.seconds - self.first.seconds

    @property
    def residual_s(self) -> float:
        """Uncertainty of a moment between."""
        return max(self.first.residual_s, self.last.residual_s) + self.device_residual_s


def align(rank: int, world: int) -> Offset:
    """Ask the first rank for its time (Cristian 1989). Every rank of the world calls this together."""
    if world == 1:
        return Offset()
    dist.barrier()
    message = torch.zeros((), dtype=torch.int64)
    if rank:
        return min((_ask(message) for _ in range(ROUNDS)), key=lambda offset: offset.residual_s)
    for other in range(1, world):
        for _ in range(ROUNDS):
            dist.recv(message, other)
            dist.send(message.fill_(time.perf_counter_ns()), other)
    return Offset()


def _ask(message: torch.Tensor) -> Offset:
    before = time.perf_counter_ns()
    dist.send(message, 0)
    dist.recv(message, 0)
    after = time.perf_counter_ns()
    middle = (before + after) / 2
    return Offset(seconds=(message.item() - middle) / 1e9, residual_s=(after - before) / 2e9, at_s=middle / 1e9)
