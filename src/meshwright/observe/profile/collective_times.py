"""Every collective of a step: its call, its end, and how long its users waited.

All collectives, fully_shard's too, go through functions of torch.distributed or their stand-ins in compat. They are
announced to `parallel.groups.traffic` just before, which knows the axis. `listening` wraps these functions.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright import compat
from meshwright.observe.profile.clock import Clock, Mark
from meshwright.observe.spans import Inner, replaced
from meshwright.parallel.groups.group import Traffic

BLOCKING = (
    (compat, "all_gather_into"),
    (compat, "reduce_scatter_into"),
    (dist, "all_reduce"),
    (dist, "all_to_all_single"),
    (dist, "batch_isend_irecv"),
    (dist, "barrier"),
)
"""Functions that return work to wait for, or have waited when they return."""


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
        if not self.clock.computes_here:  # on another stream, which users wait for by events
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
