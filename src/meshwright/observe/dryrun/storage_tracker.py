"""Every piece of memory that tensors take while a program runs: when, how much, its maker, when it was freed.

A `StorageWatch` sees each operation and follows the storages of its outputs, not the tensors. Views take nothing, and a
tensor subclass may claim more than it holds: a DTensor's wrapper has the global size and no memory, while its local
tensor comes out of operations like any other. Storages that are freed and refilled in place (`resize_`, by which FSDP
releases gathered parameters) change their size. It works on fake and on real tensors.
"""

import sys
import weakref
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright import compat
from meshwright.observe.dryrun.op_cache import Call, plain_call
from meshwright.spec.memory.held import Purpose, purpose
from meshwright.store.saver import Piece

PACKAGE = __name__.partition(".")[0]
OBSERVERS = f"{PACKAGE}.observe"
DEVICE, ADD = torch.ops.prim.device.default, torch.ops.aten.add.Tensor
META = torch.device("meta")
WRAPPERS = (DTensor, Piece)
ROUNDING_BYTES = {"cuda": 512, "cpu": 1}
"""Allocation granularity: CUDA's caching allocator gives multiples of 512 bytes."""
DEEPEST = 60
"""Most frames that are searched for the line that made a tensor."""
Within = Callable[[Any, tuple[Any, ...]], int]
"""(operation, its arguments) -> bytes."""


@dataclass(slots=True, eq=False)
class StorageRecord:
    """One storage. Moments are numbers of events; `died` is -1 while it lives."""

    number: int
    size_bytes: int
    phase: int
    """Index in Watch.phases of the phase in which it was made."""
    operation: str
    line: str
    """`file.py:123 function` of this package, or of the first caller."""
    module: str
    """Module of the model whose forward pass made it."""
    shape: tuple[int, ...]
    dtype: str
    outer: str
    """Package whose code called the operation: meshwright, torch.distributed.fsdp ..."""
    purpose: Purpose
    """Purpose that its maker declares."""
    died: int = -1
    death_phase: int = -1
    kind: str = ""


@dataclass(frozen=True, slots=True)
class ProgramPhase:
    """A phase of the program: `forward`, `backward` ... of a stage's micro-batch."""

    name: str
    start: int
    """Number of its first event."""


class StorageWatch(compat.DispatchMode):
    """Dispatch mode that follows storages while it is entered.

    Args:
        round_bytes: Granularity of allocations.
        call: Replaces calling an operation.
        within: Bytes that an operation takes and returns before it ends.
    """

    def __init__(self, round_bytes: int = 1, call: Call | None = None, within: Within | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.round_bytes = round_bytes
        self.call = call or plain_call
        self.within = within
        self.records: list[StorageRecord] = []
        self.phases: list[ProgramPhase] = [ProgramPhase("start", 0)]
        self.module = ""
        # Numbers of records and changes in bytes by turns. Millions of events: an array takes 16 bytes for each, where
        # a list of tuples would take a hundred. Both go in at once, since a thread of Gloo may free a tensor meanwhile.
        self._events = array("q")
        self._known: dict[int, tuple[weakref.ref[Any], StorageRecord]] = {}
        self._alive = 0
        self.peak_bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return False: compiled code takes memory that no mode sees, so code runs uncompiled in a watch."""
        return False

    def look(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and follow its outputs."""
        # Asking a fake tensor for its device is half of all calls, and slow the usual way.
        if operation is DEVICE and hasattr(args[0], "fake_device"):
            return args[0].fake_device
        for kind in types:
            # A wrapper runs operations on the tensor that it holds, and these come by here.
            if issubclass(kind, WRAPPERS):
                return NotImplemented
        out = self.call(operation, args, kwargs or {})
        if type(out) is tuple or type(out) is list:
            for tensor in out:
                if isinstance(tensor, Tensor):
                    self.see(tensor, operation)
        elif isinstance(out, Tensor):
            self.see(out, operation)
        if self.within is not None and (size := self.within(operation, args)):
            self._record_workspace(operation, size)
        return out

    __torch_dispatch__ = look

    def see(self, tensor: Tensor, operation: Any = None) -> StorageRecord | None:
        """Follow a tensor's storage from now on, and record a change of its size."""
        if getattr(tensor, "fake_device", tensor.device if type(tensor) is Tensor else None) == META:
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return None  # without memory of its own
        key = compat.storage_key(storage)
        earlier = self._known.get(key)
        size = self._round(storage.nbytes())
        # A key is an address, which another storage may have got since: the weak reference tells.
        if earlier is not None and earlier[0]() is not None:
            record = earlier[1]
            if size != record.size_bytes and record.purpose != "host":
                self._change_size(record, size)
            return record
        record = self._add_record(tuple(tensor.shape), tensor.dtype, 0 if purpose() == "host" else size, operation)
        self._known[key] = weakref.ref(storage, partial(self._end_record, key)), record
        return record

    def resized(self, storage: Any) -> None:
        """Record that a storage was resized in place."""
        earlier = self._known.get(compat.storage_key(storage))
        if earlier is not None:
            self._change_size(earlier[1], self._round(storage.nbytes()))

    def enter(self, name: str) -> None:
        """Start a phase."""
        self.phases.append(ProgramPhase(name, self.now))

    def close(self) -> None:
        """Follow no storage any more: what is freed later is no event, and every reader finds the same ones."""
        self._known.clear()

    @property
    def now(self) -> int:
        """Number of the next event."""
        return len(self._events) // 2

    def rise(self, start: int) -> int:
        """Return the highest total since event `start`, beyond the bytes held before it."""
        return max(accumulate(self._events[2 * start + 1 :: 2], initial=0))

    def events(self) -> Iterator[tuple[int, int]]:
        """Iterate over (number of a record, change in bytes), in order."""
        return zip(self._events[::2], self._events[1::2], strict=True)

    def _add_record(self, shape: tuple[int, ...], dtype: torch.dtype, size: int, operation: Any) -> StorageRecord:
        line, outer = _maker_of(sys._getframe(2))
        record = StorageRecord(
            number=len(self.records),
            size_bytes=size,
            phase=len(self.phases) - 1,
            operation=compat.operation_name(operation),
            line=line,
            module=self.module,
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            outer=outer,
            purpose=purpose(),
        )
        self.records.append(record)
        self._add_event(record, size)
        return record

    def _record_workspace(self, operation: Any, size: int) -> None:
        """Record memory inside the operation that has just ended."""
        # It appears after the outputs, since it exists together with them, and dies with the next event.
        record = self._add_record((size,), torch.uint8, self._round(size), operation)
        record.died, record.death_phase = self.now, record.phase
        self._add_event(record, -record.size_bytes)
        record.size_bytes = 0

    def _round(self, size: int) -> int:
        return -(-size // self.round_bytes) * self.round_bytes

    def _change_size(self, record: StorageRecord, size: int) -> None:
        self._add_event(record, size - record.size_bytes)
        record.size_bytes = size

    def _end_record(self, key: int, gone: object) -> None:
        if key not in self._known:
            return  # freed on another thread while the watch was closed
        _, record = self._known.pop(key)
        record.died, record.death_phase = self.now, len(self.phases) - 1
        self._add_event(record, -record.size_bytes)
        record.size_bytes = 0

    def _add_event(self, record: StorageRecord, size: int) -> None:
        if not size:
            return
        self._events.extend((record.number, size))
        self._alive += size
        self.peak_bytes = max(self.peak_bytes, self._alive)


class FakeWatch(compat.BareMode, StorageWatch):
    """StorageWatch of a dry run, where nothing is compiled."""

    def look(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and follow its outputs."""
        # Autograd itself adds gradients that meet, in place where it alone holds the first, but never those without
        # values. No line of Python is between its engine and this call.
        if operation is ADD and sys._getframe(1).f_code is compat.BACKWARD and compat.has_own_memory(args[0]):
            return args[0]
        return super().look(operation, types, args, kwargs)

    __torch_dispatch__ = look


def _maker_of(frame: FrameType | None) -> tuple[str, str]:
    """Return the innermost line of this package outside `observe`, and the package that called the operation."""
    outer, first = "", ""
    for _ in range(DEEPEST):
        if frame is None:
            break
        name = frame.f_globals.get("__name__", "")
        # Lines of the observers are on every stack, and never made a tensor of the program.
        if name.startswith(PACKAGE) and not name.startswith(OBSERVERS):
            location = f"{_file(name)}:{frame.f_lineno} {frame.f_code.co_qualname}"
            return location, outer or PACKAGE
        if name.startswith("torch.distributed.fsdp") and not outer:
            outer = "fsdp"
            first = first or f"{_file(name)}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return first, outer


def _file(module: str) -> str:
    return module.replace(".", "/") + ".py"
