"""Every piece of memory that tensors take while a program runs: when, how much, what made it, when it was free again.

A `StorageWatch` sees each operation and follows the storages of what comes out, not the tensors: views take nothing,
and a tensor subclass may claim more than it holds (a DTensor's wrapper has the global size and no memory; its local
tensor comes out of operations like any other). Storages freed and filled again in place (`resize_`, by which FSDP lets
go of gathered parameters) change their size. It works on fake tensors and on real ones alike.
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
from meshwright.spec.purpose import Purpose, purpose
from meshwright.store.tensor_piece import Piece

PACKAGE = __name__.partition(".")[0]
OWN = f"{PACKAGE}.observe"
DEVICE = torch.ops.prim.device.default
META = torch.device("meta")
WRAPPERS = (DTensor, Piece)
ROUNDING_BYTES = {"cuda": 512, "cpu": 1}
"""What torch's allocators make of a request: CUDA's caching allocator gives multiples of 512 bytes."""
DEEPEST = 60
"""Frames that are looked through for the line that made a tensor."""


@dataclass(slots=True, eq=False)
class StorageRecord:
    """One storage. Moments are numbers of events; `died` is -1 while it lives."""

    number: int
    size_bytes: int
    phase: int
    """Index in Watch.phases of where it was born."""
    operation: str
    line: str
    """`file.py:123 function` of this package, or of the first caller."""
    module: str
    """Of the model, where a forward pass made it."""
    shape: tuple[int, ...]
    dtype: str
    outer: str
    """Package whose code called the operation: meshwright, torch.distributed.fsdp ..."""
    purpose: Purpose
    """What its maker says it is for."""
    died: int = -1
    death_phase: int = -1
    kind: str = ""


@dataclass(frozen=True, slots=True)
class ProgramPhase:
    """A stretch of the program: `forward`, `backward` ... of a stage's micro-batch."""

    name: str
    start: int
    """First event."""


Within = Callable[[Any, tuple[Any, ...]], int]
"""(operation, its arguments) -> bytes."""


class StorageWatch(compat.DispatchMode):
    """Follows storages while it is entered. `round_bytes`: allocations are multiples of so many bytes. `call` stands
    for calling an operation. `within`: bytes that an operation takes and gives back before it ends."""

    def __init__(self, round_bytes: int = 1, call: Call | None = None, within: Within | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.round_bytes = round_bytes
        self.call = call or plain_call
        self.within = within
        self.records: list[StorageRecord] = []
        self.phases: list[ProgramPhase] = [ProgramPhase("start", 0)]
        self.module = ""
        self._event_record = array("q")
        self._event_bytes = array("q")
        self._known: dict[int, tuple[weakref.ref[Any], StorageRecord]] = {}
        self._alive = 0
        self.peak_bytes = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """No: a compiled function runs as it was written while a watch is entered. Inside compiled code memory is taken
        by calls that no mode sees, so what it holds would be missing."""
        return False

    def look(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let it happen and look at what came out."""
        if operation is DEVICE and hasattr(args[0], "fake_device"):  # half of all calls, and slow the usual way
            return args[0].fake_device
        for kind in types:
            if issubclass(kind, WRAPPERS):
                return NotImplemented  # its own operations on what it holds come by here
        out = self.call(operation, args, kwargs or {})
        if type(out) is tuple or type(out) is list:
            for one in out:
                if isinstance(one, Tensor):
                    self.see(one, operation)
        elif isinstance(out, Tensor):
            self.see(out, operation)
        if self.within is not None and (size := self.within(operation, args)):
            self._taken(operation, size)
        return out

    __torch_dispatch__ = look

    def see(self, tensor: Tensor, operation: Any = None) -> StorageRecord | None:
        """Follow a tensor's storage from now on, and note its size where it changed."""
        if getattr(tensor, "fake_device", tensor.device if type(tensor) is Tensor else None) == META:
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return None  # without memory of its own
        key = compat.storage_key(storage)
        found = self._known.get(key)
        size = self._round(storage.nbytes())
        if found is not None and found[0]() is not None:
            record = found[1]
            if size != record.size_bytes and record.purpose != "host":
                self._changed(record, size)
            return record
        record = self._born(tuple(tensor.shape), tensor.dtype, 0 if purpose() == "host" else size, operation)
        self._known[key] = weakref.ref(storage, partial(self._died, key)), record
        return record

    def resized(self, storage: Any) -> None:
        """A storage was given another size in place."""
        found = self._known.get(compat.storage_key(storage))
        if found is not None:
            self._changed(found[1], self._round(storage.nbytes()))

    def enter(self, name: str) -> None:
        """From now on."""
        self.phases.append(ProgramPhase(name, len(self._event_record)))

    @property
    def now(self) -> int:
        """The number of the next event."""
        return len(self._event_record)

    def rise(self, start: int) -> int:
        """The most bytes that were held since event `start`, beyond those that were held before it."""
        return max(accumulate(self._event_bytes[start:], initial=0))

    def events(self) -> Iterator[tuple[int, int]]:
        """(number of a record, bytes more or less), in order."""
        return zip(self._event_record, self._event_bytes, strict=True)

    def _born(self, shape: tuple[int, ...], dtype: torch.dtype, size: int, operation: Any) -> StorageRecord:
        line, outer = _line(sys._getframe(2))
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
        self._event(record, size)
        return record

    def _taken(self, operation: Any, size: int) -> None:
        """Inside the operation that has just ended."""
        record = self._born((size,), torch.uint8, self._round(size), operation)
        record.died, record.death_phase = len(self._event_record), record.phase
        self._event(record, -record.size_bytes)
        record.size_bytes = 0

    def _round(self, size: int) -> int:
        return -(-size // self.round_bytes) * self.round_bytes

    def _changed(self, record: StorageRecord, size: int) -> None:
        self._event(record, size - record.size_bytes)
        record.size_bytes = size

    def _died(self, key: int, gone: object) -> None:
        _, record = self._known.pop(key)
        record.died, record.death_phase = len(self._event_record), len(self.phases) - 1
        self._event(record, -record.size_bytes)
        record.size_bytes = 0

    def _event(self, record: StorageRecord, size: int) -> None:
        if not size:
            return
        self._event_record.append(record.number)
        self._event_bytes.append(size)
        self._alive += size
        self.peak_bytes = max(self.peak_bytes, self._alive)


class FakeWatch(compat.BareMode, StorageWatch):
    """The same for a dry run, of which nothing is compiled."""

    __torch_dispatch__ = StorageWatch.look


def _line(frame: FrameType | None) -> tuple[str, str]:
    """The innermost line of this package (the watching itself left out), and whose code called the operation."""
    outer, first = "", ""
    for _ in range(DEEPEST):
        if frame is None:
            break
        name = frame.f_globals.get("__name__", "")
        if name.startswith(PACKAGE) and not name.startswith(OWN):
            here = f"{_file(name)}:{frame.f_lineno} {frame.f_code.co_qualname}"
            return here, outer or PACKAGE
        if name.startswith("torch.distributed.fsdp") and not outer:
            outer = "fsdp"
            first = first or f"{_file(name)}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return first, outer


def _file(module: str) -> str:
    return module.replace(".", "/") + ".py"
