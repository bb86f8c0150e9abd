"""Recorder of one rank: operations it starts and waits for, and buffers that its kernels touch.

It hooks torch's process groups, below every collective of the engine and of fully_shard, and so does not depend on how
those are written. The dispatcher's collectives are counted as well: one that bypasses the hooks is an error.
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
    is_collective_operation,
    launch_of,
    list_groups,
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
from meshwright.observe.spans import Inner, Span, replaced, report_spans
from meshwright.parallel import Mesh
from meshwright.parallel.groups.group import Traffic
from meshwright.spec.errors import PlanError

PACKAGE = "meshwright."
SKIPPED_MODULES = ("meshwright.observe", "meshwright.compat", "meshwright.parallel.groups.group")
DEEPEST = 60


class TraceRecorder(compat.BareMode):
    """Dispatch mode that records the program that runs inside `listening`."""

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
        self._recorded = self._dispatched = 0
        self._launches: dict[Any, Launch] = {}
        self._seen: set[Any] = set()
        self._open: dict[int, list[tuple[int, bool, int, int]]] = {}
        """Storage -> (operation, True if it writes there, first byte, last byte) of operations not waited for."""
        self._held: dict[int, list[tuple[int, Any]]] = {}

    def trace(self) -> Trace:
        """Return the recorded trace."""
        if self._dispatched != self._recorded:
            raise RuntimeError(f"{self._dispatched} collectives were dispatched and {self._recorded} were recorded")
        return Trace(tuple(self.operations), tuple(self.events))

    def communicators(self, mesh: Mesh) -> tuple[Communicator, ...]:
        """Return the groups of this process in order of creation. Axis: the mesh's first name, else traffic's."""
        axes: dict[str, str] = {}
        for name, group in mesh.groups.items():
            if group.process_group is not None:
                axes.setdefault(group_name(group.process_group), name)
        axes = self._axes | axes
        return tuple(Communicator(name=name, ranks=ranks, axis=axes.get(name, "own")) for name, ranks in list_groups())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record collectives and kernels of this process inside."""
        with ExitStack() as stack:
            for name, read in group_methods().items():
                stack.enter_context(replaced(dist.ProcessGroup, name, partial(self._record_call, read)))
            stack.enter_context(replaced(dist, "batch_isend_irecv", self._record_batch))
            stack.enter_context(replaced(torch.UntypedStorage, "resize_", self._record_resize))
            stack.enter_context(replaced(Traffic, "begin", self._note_axis))
            stack.enter_context(report_spans(self._enter_part))
            stack.enter_context(self)
            yield

    def _enter_part(self, span: Span | None) -> None:
        self.action = ""
        if span is not None:
            stage = f" of stage {span.stage}, micro-batch {span.micro_batch}" if span.stage >= 0 else ""
            self.action = span.name + stage

    def _note_axis(self, inner: Inner, traffic: Traffic, axis: str, collective: str) -> None:
        self._axis = axis
        inner(traffic, axis, collective)

    def _record_call(
        self, read: Callable[..., GroupCall], inner: Inner, group: dist.ProcessGroup, *arguments: Any, **keywords: Any
    ) -> Any:
        call = read(*arguments, **keywords)
        if call.kind == "unknown":
            raise PlanError(f"the trace checker does not know the collective {inner.__name__}")
        self._recorded += 1
        number = self._start(group, call)
        work = inner(group, *arguments, **keywords)
        # A blocking call has waited when it returns: kernels from here on come after it.
        if work is None:
            self.record_wait(number)
            return None
        return _Started(self, number, work)

    def _start(self, group: dist.ProcessGroup, call: GroupCall) -> int:
        if not self._groups:
            self._groups = {name: n for n, (name, _) in enumerate(list_groups())}
        name = group_name(group)
        # Groups may also be made after the first collective.
        if name not in self._groups:
            self._groups = {name: n for n, (name, _) in enumerate(list_groups())}
        if self._axis:
            self._axes.setdefault(name, self._axis)
            self._axis = self._axis if self._batch is not None else ""
        number = len(self.operations)
        self.operations.append(_describe_call(self._groups[name], group, call, self._where()))
        for tensor, written in ((call.contributed, False), (call.received_into, True)):
            if tensor is not None:
                self._watch_buffer(number, tensor, written)
        if self._batch is None:
            self.events.append(Start((number,)))
        else:
            self._batch.append(number)
        return number

    def _record_batch(self, inner: Inner, *arguments: Any, **keywords: Any) -> Any:
        self._batch = []
        try:
            return inner(*arguments, **keywords)
        finally:
            numbers, self._batch, self._axis = tuple(self._batch), None, ""
            if numbers:
                self.events.append(Start(numbers))

    def record_wait(self, number: int) -> None:
        """Record that kernels from here on run after an operation."""
        self.events.append(WaitEvent(number))
        for key, _ in self._held.pop(number, ()):
            others = [watched for watched in self._open.get(key, ()) if watched[0] != number]
            if others:
                self._open[key] = others
            else:
                self._open.pop(key, None)

    def _watch_buffer(self, number: int, tensor: Tensor, written: bool) -> None:
        storage = tensor.untyped_storage()
        key = compat.storage_key(storage)
        first, last = _extent(tensor)
        self._open.setdefault(key, []).append((number, written, first, last))
        # A weak reference, since holding the storage would hide that the program frees it too early.
        self._held.setdefault(number, []).append((key, weakref.ref(storage, partial(self._freed, key))))

    def _freed(self, key: int, gone: object = None) -> None:
        for number in dict.fromkeys(watched[0] for watched in self._open.pop(key, ())):
            self.events.append(Touch(number, "freed", self._where()))

    def _record_resize(self, inner: Inner, storage: torch.UntypedStorage, size: int) -> Any:
        # FSDP frees gathered parameters in place: for a running collective that is as bad as dropping them.
        if self._open and size < storage.nbytes():
            self._freed(compat.storage_key(storage))
        return inner(storage, size)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        launch = self._launches.get(operation)
        if launch is None:
            launch = self._launches[operation] = launch_of(operation)
        if launch.computes:
            self._record_kernel(operation, launch, args, kwargs or {})
        elif is_collective_operation(operation):
            self._dispatched += 1
        return self.call(operation, args, kwargs or {})

    def _record_kernel(self, operation: Any, launch: Launch, args: Any, kwargs: Any) -> None:
        key = operation, _kernel_key(args), _kernel_key(kwargs.values()) if kwargs else ()
        first = key not in self._seen
        if self._open:
            self._record_touches(operation, launch, args, kwargs)
        last = self.events[-1] if self.events else None
        # Launches in a row are one event, else a trace would have one per kernel. A first launch must stay visible.
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

    def _record_touches(self, operation: Any, launch: Launch, args: Any, kwargs: Any) -> None:
        arguments = [(argument, position in launch.positions) for position, argument in enumerate(args)]
        arguments += [(argument, name in launch.names) for name, argument in kwargs.items()]
        for argument, writes in arguments:
            for tensor in _tensors(argument):
                for number, written, first, last in self._open.get(_storage(tensor), ()):
                    touched = _extent(tensor)
                    # Reading what is being sent is harmless: only a write on either side is a race.
                    if touched[0] < last and first < touched[1] and (writes or written):
                        where = f"{compat.operation_name(operation)}, {self._where()}"
                        self.events.append(Touch(number, "written" if writes else "read", where))

    def _where(self) -> str:
        return ", ".join(filter(None, (self.part, self.action, _source_line())))


class _Started(dist.Work):
    def __init__(self, recorder: TraceRecorder, number: int, work: Any) -> None:
        super().__init__()
        self.recorder, self.number, self.work = recorder, number, work

    def wait(self, *arguments: Any) -> bool:
        """Record the wait, then wait."""
        self.recorder.record_wait(self.number)
        return bool(self.work.wait(*arguments))

    def is_completed(self) -> bool:
        """Return False: chance completion must not change what a rank does."""
        return False


def _describe_call(communicator: int, group: dist.ProcessGroup, call: GroupCall, where: str) -> CommunicationOperation:
    tensor = call.contributed if call.contributed is not None else call.received_into
    size, index = group.size(), group.rank()
    elements = tensor.numel() if tensor is not None else 0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    if call.kind == "all_to_all" and call.contributed is not None and call.received_into is not None:
        sent = _elements_per_rank(call.contributed, call.sent, size)
        received = _elements_per_rank(call.received_into, call.received, size)
    return CommunicationOperation(
        group=communicator,
        kind=call.kind,
        elements=elements,
        dtype=str(tensor.dtype).removeprefix("torch.") if tensor is not None else "",
        element_bytes=tensor.element_size() if tensor is not None else 0,
        reduce=call.reduce,
        # A distance instead of a rank, so that ranks of a ring have equal traces.
        peer=(call.peer - index) % size if call.kind in ("send", "receive") else 0,
        sent=sent,
        received=received,
        where=where,
    )


def _elements_per_rank(tensor: Tensor, rows: Any, size: int) -> tuple[int, ...]:
    if not rows:
        return (tensor.numel() // size,) * size
    width = tensor.numel() // max(1, len(tensor))
    return tuple(count * width for count in rows)


def _kernel_key(values: Any) -> tuple[Any, ...]:
    """Return what tells kernels apart: dtypes and sizes of their inputs."""
    return tuple((tensor.dtype, tensor.shape) for value in values for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (element for element in value if isinstance(element, Tensor))


def _storage(tensor: Tensor) -> int:
    try:
        return compat.storage_key(tensor.untyped_storage())
    except NotImplementedError:
        return -1  # without memory of its own


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return (first byte, byte after the last) of a tensor in its storage."""
    size, start = tensor.element_size(), tensor.storage_offset()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return int(start * size), int((start + (reach if tensor.numel() else 0)) * size)


def _source_line() -> str:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(DEEPEST):
        if frame is None:
            break
        name = frame.f_globals.get("__name__", "")
        if name.startswith(PACKAGE) and not name.startswith(SKIPPED_MODULES):
            return f"{name.replace('.', '/')}.py:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return ""
