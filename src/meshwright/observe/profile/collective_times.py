"""Every collective of a step: when it was called, when it had ended, and for how long whoever needed it waited.

All go through functions of torch.distributed (or their stand-ins in compat), fully_shard's too, and are told to
`parallel.traffic` just before, which says the axis. While `heard` is open, these functions tell of themselves.
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
from meshwright.parallel.traffic import Traffic

BLOCKING = (
    (compat, "all_gather_into"),
    (compat, "reduce_scatter_into"),
    (dist, "all_reduce"),
    (dist, "all_to_all_single"),
    (dist, "batch_isend_irecv"),
    (dist, "barrier"),
)
"""What gives work to wait for, or has waited when it returns."""


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One collective, or the sends and receives that are started together."""

    axis: str
    collective: str
    sent_bytes: int
    begun: Mark
    ended: Mark = None
    """When somebody had waited for it; None = nobody did."""


@dataclass(frozen=True, slots=True)
class WaitSpan:
    """A stretch in which a rank could not go on for a call."""

    call: CollectiveCall
    start: Mark
    end: Mark


class CollectiveCalls:
    """What was heard; `waited` is told of each wait as it ends."""

    def __init__(self, clock: Clock, waited: Callable[[WaitSpan], None]) -> None:
        self.clock, self.waited = clock, waited
        self.calls: list[CollectiveCall] = []
        self._told: list[tuple[str, str, int]] = []
        self._on_stream: dict[Any, CollectiveCall] = {}
        self._of_event: dict[Any, CollectiveCall] = {}

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, calls of this process are heard."""
        with ExitStack() as stack:
            stack.enter_context(replaced(Traffic, "begin", self._begin))
            stack.enter_context(replaced(Traffic, "add", self._add))
            for owner, name in BLOCKING:
                stack.enter_context(replaced(owner, name, self._called))
            if torch.cuda.is_available():
                stack.enter_context(replaced(torch.cuda.Stream, "record_event", self._recorded))
                stack.enter_context(replaced(torch.cuda.Stream, "wait_event", self._awaited))
            yield

    def _begin(self, inner: Inner, traffic: Traffic, axis: str, collective: str) -> None:
        self._told.append((axis, collective, 0))
        inner(traffic, axis, collective)

    def _add(self, inner: Inner, traffic: Traffic, axis: str, collective: str, sent_bytes: int) -> None:
        if self._told:
            self._told[-1] = axis, collective, sent_bytes
        inner(traffic, axis, collective, sent_bytes)

    def _called(self, inner: Inner, *given: Any, **named: Any) -> Any:
        one = self._new()
        work = inner(*given, **named)
        if not self.clock.computes_here:  # on a stream of its own, which others will wait for
            one.ended = self.clock.mark()
            self._on_stream[torch.cuda.current_stream()] = one
            return work
        if work is None:
            self._waited(one, one.begun)
            return None
        return [_Work(one, self, w) for w in work] if isinstance(work, list) else _Work(one, self, work)

    def _new(self) -> CollectiveCall:
        """As traffic was just told; what FSDP sums over replicas it tells only afterwards."""
        told, self._told = self._told or [("replicate", "all_reduce", 0)], []
        axis, collective, _ = next((one for one in told if one[1] == "send"), told[-1])
        sent = sum(size for _, what, size in told if what == collective)
        call = CollectiveCall(axis, collective, sent, self.clock.mark())
        self.calls.append(call)
        return call

    def _waited(self, call: CollectiveCall, start: Mark) -> None:
        call.ended = self.clock.mark()
        self.waited(WaitSpan(call, start, call.ended))

    def _recorded(self, inner: Inner, stream: Any, *given: Any) -> Any:
        event = inner(stream, *given)
        if stream in self._on_stream:
            self._of_event[event] = self._on_stream[stream]
        return event

    def _awaited(self, inner: Inner, stream: Any, event: Any) -> None:
        call = self._of_event.get(event) if self.clock.computes_here else None
        if call is None or stream != torch.cuda.current_stream():
            inner(stream, event)
            return
        start = self.clock.mark()
        inner(stream, event)
        self.waited(WaitSpan(call, start, self.clock.mark()))


class _Work:
    """A call under way, as who started it sees it."""

    def __init__(self, call: CollectiveCall, calls: CollectiveCalls, work: dist.Work) -> None:
        self.call, self.calls, self.work = call, calls, work

    def wait(self, *given: Any) -> bool:
        """Until it has ended."""
        start = self.calls.clock.mark()
        done = self.work.wait(*given)
        self.calls._waited(self.call, start)
        return bool(done)

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return bool(self.work.is_completed())
