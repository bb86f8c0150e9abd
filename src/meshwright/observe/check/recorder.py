"""Records one rank: what it starts and waits for, at torch's process groups, and which buffers its kernels meet.

It listens below every collective of the engine and of fully_shard, so it does not depend on how those are written. What
the dispatcher sees of collectives is counted as well: one that passes by the methods of process groups is an error.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import compat
from meshwright.compat.process_groups import (
    GroupCall,
    Launch,
    group_methods,
    group_name,
    groups_made,
    is_collective_operation,
    launch_of,
)
from meshwright.observe.check.events import (
    CommunicationOperation,
    Communicator,
    Compute,
    Event,
    Start,
    Touch,
    Trace,
    WaitEvent,
)
from meshwright.observe.dryrun.op_cache import Call, plain_call
from meshwright.observe.spans import Inner, Span, replaced, told
from meshwright.parallel import Mesh
from meshwright.parallel.traffic import Traffic
from meshwright.spec.errors import PlanError

PACKAGE = "meshwright."
PASSED_OVER = ("meshwright.observe", "meshwright.compat", "meshwright.parallel.group")
DEEPEST = 60


class TraceRecorder(compat.BareMode):
    """A mode that keeps the trace of the program that runs inside `listening`."""

    def __init__(self, call: Call | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.call = call or plain_call
        self.operations: list[CommunicationOperation] = []
        self.events: list[Event] = []
        self.part, self.action = "", ""
        self._groups: dict[str, int] = {}
        self._axis = ""
        self._axes: dict[str, str] = {}
        self._batch: list[int] | None = None
        self._heard = self._dispatched = 0
        self._launches: dict[Any, Launch] = {}
        self._seen: set[Any] = set()
        self._open: dict[int, list[tuple[int, bool, int, int]]] = {}
        """Storage -> (operation, whether it is written by it, first byte, last byte) of those not waited for."""
        self._held: dict[int, list[tuple[int, Any]]] = {}

    def trace(self) -> Trace:
        """What was recorded."""
        if self._dispatched != self._heard:
            raise RuntimeError(f"{self._dispatched} collectives were dispatched and {self._heard} were recorded")
        return Trace(tuple(self.operations), tuple(self.events))

    def communicators(self, mesh: Mesh) -> tuple[Communicator, ...]:
        """The groups of this process as they were made; axis: the mesh's first name for it, else traffic's."""
        axes: dict[str, str] = {}
        for name, group in mesh.groups.items():
            if group.process_group is not None:
                axes.setdefault(group_name(group.process_group), name)
        axes = self._axes | axes
        return tuple(Communicator(name=name, ranks=ranks, axis=axes.get(name, "own")) for name, ranks in groups_made())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, collectives and kernels of this process are recorded."""
        with ExitStack() as stack:
            for name, read in group_methods().items():
                stack.enter_context(replaced(dist.ProcessGroup, name, partial(self._method, read)))
            stack.enter_context(replaced(dist, "batch_isend_irecv", self._batched))
            stack.enter_context(replaced(torch.UntypedStorage, "resize_", self._resizing))
            stack.enter_context(replaced(Traffic, "begin", self._begins))
            stack.enter_context(told(self._span))
            stack.enter_context(self)
            yield

    def _span(self, span: Span | None) -> None:
        self.action = ""
        if span is not None:
            stage = f" of stage {span.stage}, micro-batch {span.micro_batch}" if span.stage >= 0 else ""
            self.action = span.name + stage

    def _begins(self, inner: Inner, traffic: Traffic, axis: str, collective: str) -> None:
        self._axis = axis
        inner(traffic, axis, collective)

    def _method(
        self, read: Callable[..., GroupCall], inner: Inner, group: dist.ProcessGroup, *given: Any, **named: Any
    ) -> Any:
        call = read(*given, **named)
        if call.kind == "unknown":
            raise PlanError(f"the trace checker does not know the collective {inner.__name__}")
        self._heard += 1
        number = self._start(group, call)
        work = inner(group, *given, **named)
        if work is None:  # what it computes next already comes after
            self.ended(number)
            return None
        return _Started(self, number, work)

    def _start(self, group: dist.ProcessGroup, call: GroupCall) -> int:
        if not self._groups:
            self._groups = {name: n for n, (name, _) in enumerate(groups_made())}
        name = group_name(group)
        if name not in self._groups:  # made after the first collective
            self._groups = {name: n for n, (name, _) in enumerate(groups_made())}
        if self._axis:
            self._axes.setdefault(name, self._axis)
            self._axis = self._axis if self._batch is not None else ""
        number = len(self.operations)
        self.operations.append(_operation(self._groups[name], group, call, self._where()))
        for tensor, written in ((call.contributed, False), (call.received_into, True)):
            if tensor is not None:
                self._watch(number, tensor, written)
        if self._batch is None:
            self.events.append(Start((number,)))
        else:
            self._batch.append(number)
        return number

    def _batched(self, inner: Inner, *given: Any, **named: Any) -> Any:
        self._batch = []
        try:
            return inner(*given, **named)
        finally:
            numbers, self._batch, self._axis = tuple(self._batch), None, ""
            if numbers:
                self.events.append(Start(numbers))

    def ended(self, number: int) -> None:
        """Kernels from here on run after an operation."""
        self.events.append(WaitEvent(number))
        for key, _ in self._held.pop(number, ()):
            left = [one for one in self._open.get(key, ()) if one[0] != number]
            if left:
                self._open[key] = left
            else:
                self._open.pop(key, None)

    def _watch(self, number: int, tensor: Tensor, written: bool) -> None:
        storage = tensor.untyped_storage()
        key = compat.storage_key(storage)
        first, last = _extent(tensor)
        self._open.setdefault(key, []).append((number, written, first, last))
        self._held.setdefault(number, []).append((key, weakref.ref(storage, partial(self._freed, key))))

    def _freed(self, key: int, gone: object = None) -> None:
        for number in dict.fromkeys(one[0] for one in self._open.pop(key, ())):
            self.events.append(Touch(number, "freed", self._where()))

    def _resizing(self, inner: Inner, storage: torch.UntypedStorage, size: int) -> Any:
        if self._open and size < storage.nbytes():
            self._freed(compat.storage_key(storage))
        return inner(storage, size)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        launch = self._launches.get(operation)
        if launch is None:
            launch = self._launches[operation] = launch_of(operation)
        if launch.computes:
            self._kernel(operation, launch, args, kwargs or {})
        elif is_collective_operation(operation):
            self._dispatched += 1
        return self.call(operation, args, kwargs or {})

    def _kernel(self, operation: Any, launch: Launch, args: Any, kwargs: Any) -> None:
        key = operation, _kinds(args), _kinds(kwargs.values()) if kwargs else ()
        first = key not in self._seen
        if self._open:
            self._touches(operation, launch, args, kwargs)
        last = self.events[-1] if self.events else None
        if isinstance(last, Compute) and (last.first or not first):
            if first:
                self._seen.add(key)
            return
        if first:
            self._seen.add(key)
            if isinstance(last, Compute):
                self.events.pop()
        where = f"{compat.operation_name(operation)}, {self._where()}" if first else ""
        self.events.append(Compute(first, where))

    def _touches(self, operation: Any, launch: Launch, args: Any, kwargs: Any) -> None:
        given = [(value, position in launch.positions) for position, value in enumerate(args)]
        given += [(value, name in launch.names) for name, value in kwargs.items()]
        for value, writes in given:
            for tensor in _tensors(value):
                for number, written, first, last in self._open.get(_key(tensor), ()):
                    here = _extent(tensor)
                    if here[0] < last and first < here[1] and (writes or written):
                        where = f"{compat.operation_name(operation)}, {self._where()}"
                        self.events.append(Touch(number, "written" if writes else "read", where))

    def _where(self) -> str:
        return ", ".join(filter(None, (self.part, self.action, _line())))


class _Started(dist.Work):
    """An operation under way, as who started it sees it."""

    def __init__(self, recorder: TraceRecorder, number: int, work: Any) -> None:
        super().__init__()
        self.recorder, self.number, self.work = recorder, number, work

    def wait(self, *given: Any) -> bool:
        """Kernels from here on run after it."""
        self.recorder.ended(self.number)
        return bool(self.work.wait(*given))

    def is_completed(self) -> bool:
        """Not known: whether it has ended by chance must not change what a rank does."""
        return False


def _operation(place: int, group: dist.ProcessGroup, call: GroupCall, where: str) -> CommunicationOperation:
    tensor = call.contributed if call.contributed is not None else call.received_into
    size, index = group.size(), group.rank()
    elements = tensor.numel() if tensor is not None else 0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    if call.kind == "all_to_all" and call.contributed is not None and call.received_into is not None:
        sent, received = _runs(call.contributed, call.sent, size), _runs(call.received_into, call.received, size)
    return CommunicationOperation(
        group=place,
        kind=call.kind,
        elements=elements,
        dtype=str(tensor.dtype).removeprefix("torch.") if tensor is not None else "",
        element_bytes=tensor.element_size() if tensor is not None else 0,
        reduce=call.reduce,
        peer=(call.peer - index) % size if call.kind in ("send", "receive") else 0,
        sent=sent,
        received=received,
        where=where,
    )


def _runs(tensor: Tensor, rows: Any, size: int) -> tuple[int, ...]:
    """Elements for each rank."""
    if not rows:
        return (tensor.numel() // size,) * size
    width = tensor.numel() // max(1, len(tensor))
    return tuple(count * width for count in rows)


def _kinds(values: Any) -> tuple[Any, ...]:
    """What tells one kernel from another: dtypes and sizes of what it takes."""
    return tuple((tensor.dtype, tensor.shape) for value in values for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (one for one in value if isinstance(one, Tensor))


def _key(tensor: Tensor) -> int:
    try:
        return compat.storage_key(tensor.untyped_storage())
    except NotImplementedError:
        return -1  # without memory of its own


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte, and the one after the last, in the storage."""
    size, start = tensor.element_size(), tensor.storage_offset()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return int(start * size), int((start + (reach if tensor.numel() else 0)) * size)


def _line() -> str:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(DEEPEST):
        if frame is None:
            break
        name = frame.f_globals.get("__name__", "")
        if name.startswith(PACKAGE) and not name.startswith(PASSED_OVER):
            return f"{name.replace('.', '/')}.py:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return ""
