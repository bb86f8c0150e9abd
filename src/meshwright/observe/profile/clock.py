"""Moments of a rank's program, the alignment of all ranks' clocks, and every collective of a step.

All collectives, fully_shard's too, go through functions of torch.distributed or their stand-ins in compat. They are
announced to `parallel.groups.traffic` just before, which knows the axis. `CollectiveCalls.listening` wraps these
functions.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright import compat
from meshwright.observe.spans import Inner, replaced
from meshwright.parallel.groups.group import Traffic

Mark = Any
"""A moment as its clock keeps it: nanoseconds of the host, or an event on a GPU's stream."""
ROUNDS = 16
"""Questions a rank asks the first one; the quickest answer counts."""
BLOCKING = (
    (compat, "all_gather_into"),
    (compat, "reduce_scatter_into"),
    (dist, "all_reduce"),
    (dist, "all_to_all_single"),
    (dist, "batch_isend_irecv"),
    (dist, "barrier"),
)
"""Functions that return work to wait for, or have waited when they return."""


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
        # An idle device runs an event at once, so that the host's readings around it enclose it.
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
    # The answer was written somewhere between question and reply: the middle is wrong by half the time at most.
    middle = (before + after) / 2
    return Offset(seconds=(message.item() - middle) / 1e9, residual_s=(after - before) / 2e9, at_s=middle / 1e9)


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One collective, or sends and receives that start together."""

    axis: str
    collective: str
    sent_bytes: int
    start: Mark
    end: Mark = None
    """Moment at which a wait for it had ended. None = nothing waited."""


@dataclass(frozen=True, slots=True)
class WaitSpan:
    """A time in which a rank could not continue because of a call."""

    call: CollectiveCall
    start: Mark
    end: Mark


class CollectiveCalls:
    """Recorded calls. `on_wait` is called as each wait ends."""

    def __init__(self, clock: Clock, on_wait: Callable[[WaitSpan], None]) -> None:
        self.clock, self.on_wait = clock, on_wait
        self.calls: list[CollectiveCall] = []
        self._announced: list[tuple[str, str, int]] = []
        self._on_stream: dict[Any, CollectiveCall] = {}
        self._of_event: dict[Any, CollectiveCall] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record calls of this process inside."""
        with ExitStack() as stack:
            stack.enter_context(replaced(Traffic, "begin", self._announce))
            stack.enter_context(replaced(Traffic, "add", self._add_bytes))
            for owner, name in BLOCKING:
                stack.enter_context(replaced(owner, name, self._record_call))
            if torch.cuda.is_available():
                stack.enter_context(replaced(torch.cuda.Stream, "record_event", self._note_event))
                stack.enter_context(replaced(torch.cuda.Stream, "wait_event", self._wait_for_event))
            yield

    def _announce(self, inner: Inner, traffic: Traffic, axis: str, collective: str) -> None:
        self._announced.append((axis, collective, 0))
        inner(traffic, axis, collective)

    def _add_bytes(self, inner: Inner, traffic: Traffic, axis: str, collective: str, sent_bytes: int) -> None:
        if self._announced:
            self._announced[-1] = axis, collective, sent_bytes
        inner(traffic, axis, collective, sent_bytes)

    def _record_call(self, inner: Inner, *arguments: Any, **keywords: Any) -> Any:
        call = self._new_call()
        work = inner(*arguments, **keywords)
        # FSDP starts collectives on streams of its own, and its users wait for them by events.
        if not self.clock.computes_here:
            call.end = self.clock.mark()
            self._on_stream[torch.cuda.current_stream()] = call
            return work
        if work is None:
            self._record_wait(call, call.start)
            return None
        return [_Work(call, self, w) for w in work] if isinstance(work, list) else _Work(call, self, work)

    def _new_call(self) -> CollectiveCall:
        """Return a call as traffic announced it. FSDP's sums over replicas are announced only afterwards."""
        announced, self._announced = self._announced or [("replicate", "all_reduce", 0)], []
        axis, collective, _ = next((told for told in announced if told[1] == "send"), announced[-1])
        sent = sum(size for _, what, size in announced if what == collective)
        call = CollectiveCall(axis, collective, sent, self.clock.mark())
        self.calls.append(call)
        return call

    def _record_wait(self, call: CollectiveCall, start: Mark) -> None:
        call.end = self.clock.mark()
        self.on_wait(WaitSpan(call, start, call.end))

    def _note_event(self, inner: Inner, stream: Any, *arguments: Any) -> Any:
        event = inner(stream, *arguments)
        # Whoever waits for this event waits for the latest call of its stream.
        if stream in self._on_stream:
            self._of_event[event] = self._on_stream[stream]
        return event

    def _wait_for_event(self, inner: Inner, stream: Any, event: Any) -> None:
        call = self._of_event.get(event) if self.clock.computes_here else None
        if call is None or stream != torch.cuda.current_stream():
            inner(stream, event)
            return
        start = self.clock.mark()
        inner(stream, event)
        self.on_wait(WaitSpan(call, start, self.clock.mark()))


class _Work:
    def __init__(self, call: CollectiveCall, calls: CollectiveCalls, work: dist.Work) -> None:
        self.call, self.calls, self.work = call, calls, work

    def wait(self, *arguments: Any) -> bool:
        """Wait until it has ended."""
        start = self.calls.clock.mark()
        done = self.work.wait(*arguments)
        self.calls._record_wait(self.call, start)
        return bool(done)

    def is_completed(self) -> bool:
        """Return True if it has ended."""
        return bool(self.work.is_completed())
