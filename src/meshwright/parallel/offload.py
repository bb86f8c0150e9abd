"""Offload of saved activations: what a block keeps for its backward pass is held in host memory.

What a block has saved is copied out when its forward pass ends, while the next block computes, and its device memory is
let go of at the end of that one. It comes back while the block behind it makes its backward pass. The last block of a
stage keeps its own: its backward pass is the next thing. Storages are moved, not tensors, each once, however many views
of it are saved; parameters, what all blocks share (rotary tables, masks) and what a stage has received stay.
Parameters that fully_shard gathers inside of a block (experts spread over ep) are known once they are there: it frees
their storages before the block ends.

On a GPU two streams copy, one each way, and pinned buffers are taken from those that earlier blocks gave back, so that
a steady state pins nothing anew. Elsewhere (fake tensors of a dry run, a CPU that has no second memory) copies are made
in line, in the same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright import compat
from meshwright.model.attention import AttentionMetadata
from meshwright.model.kv_cache import Past
from meshwright.model.seams import BlockCall
from meshwright.model.transformer import Block, Transformer
from meshwright.parallel.saved_tensors import SavedTensorHooks, saving_by
from meshwright.spec.purpose import takes


class Lane:
    """One direction of the way between device and host."""

    def __init__(self, device: torch.device) -> None:
        real = device.type == "cuda" and torch.cuda.is_available()
        self.stream = torch.cuda.Stream(device) if real else None

    def copy(self, to: Tensor, source: Tensor, after: Any = None) -> Any:
        """Copy behind what the device's current stream has to do by now, and behind an event; the event of its end."""
        if self.stream is None or compat.is_fake(source):
            to.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        if after is not None:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
        if to.is_cuda:  # a graph may be given up before it arrives
            to.record_stream(self.stream)
        return self.stream.record_event()


def wait(event: Any) -> None:
    """The current stream goes on behind an event."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class HostBuffer:
    """Host memory, and the end of the last copy that read or wrote it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used: Any = None


class HostMemory:
    """Buffers that moves use again and again, by size."""

    def __init__(self) -> None:
        self.free: dict[tuple[int, bool], list[HostBuffer]] = {}
        self.taken_bytes = 0
        """Of all buffers, whether in use or not."""

    @takes("host")
    def take(self, source: Tensor) -> HostBuffer:
        """Of the size of a flat tensor."""
        size, fake = source.numel() * source.element_size(), compat.is_fake(source)
        if found := self.free.get((size, fake)):
            return found.pop()
        self.taken_bytes += size
        pinned = source.is_cuda and not fake
        return HostBuffer(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned))

    def give(self, buffer: HostBuffer) -> None:
        """Back, for the next."""
        memory = buffer.memory
        self.free.setdefault((memory.numel(), compat.is_fake(memory)), []).append(buffer)


class StoredStorage:
    """A storage that a block has saved: on the device, in host memory, or in both."""

    def __init__(self, owner: "KeptOfBlock", flat: Tensor) -> None:
        self.owner, self.size, self.dtype, self.device = owner, flat.numel(), flat.dtype, flat.device
        self.here: Tensor | None = flat
        self.host: HostBuffer | None = None
        self.arrived: Any = None
        self.readers = 0

    def send(self, offload: "Offload") -> None:
        """Copy it out; it stays until `let_go`."""
        assert self.here is not None
        self.host = offload.memory.take(self.here)
        finalize(self, offload.memory.give, self.host)
        self.host.used = offload.out.copy(self._host_view(), self.here, self.host.used)

    def let_go(self) -> None:
        """Of the device's memory, behind the copy."""
        if self.host is not None:
            wait(self.host.used)
            self.here = None

    def fetch(self, offload: "Offload") -> Tensor:
        """Begin to copy it back, where it is gone."""
        if self.here is None:
            assert self.host is not None
            self.here = torch.empty(self.size, dtype=self.dtype, device=self.device)
            self.arrived = self.host.used = offload.back.copy(self.here, self._host_view(), self.host.used)
        return self.here

    def read(self, offload: "Offload") -> Tensor:
        """For one of those that saved it; gone from the device after the last."""
        found = self.fetch(offload)
        wait(self.arrived)
        self.readers -= 1
        if self.readers <= 0 and self.host is not None:
            self.here = None
        return found

    def _host_view(self) -> Tensor:
        assert self.host is not None
        return self.host.memory.view(self.dtype)


class MovedTensor(NamedTuple):
    """What a node of the graph keeps in a tensor's place."""

    stored: StoredStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class KeptOfBlock:
    """What one call of a block keeps. `before`: of the block in front, whose backward pass is next. `moves`: whether it
    goes to host memory. `stays`: storages that are not to be moved, by key; `units`: modules of the block that gather
    parameters of their own, which are not to be moved either."""

    def __init__(
        self,
        offload: "Offload",
        before: "ref[KeptOfBlock] | None",
        moves: bool,
        stays: set[int],
        units: Sequence[nn.Module],
    ) -> None:
        self.offload, self.before, self.moves, self.stays, self.units = offload, before, moves, stays, units
        self.found: dict[int, StoredStorage] = {}
        self.sent: list[ref[StoredStorage]] = []
        self.begun = False

    def pack(self, saved: Tensor) -> Tensor | MovedTensor:
        """A node that kept its own result itself would never be freed without a backward pass: an alias."""
        saved = saved.detach()
        storage = saved.untyped_storage()
        key = compat.storage_key(storage)
        if key in self.stays or not storage.nbytes():
            return saved
        if key not in self.found:
            if any(key == _key(parameter) for unit in self.units for parameter in unit.parameters()):
                return saved
            flat = saved.as_strided((storage.nbytes() // saved.element_size(),), (1,), 0)
            self.found[key] = StoredStorage(self, flat)
        self.found[key].readers += 1
        return MovedTensor(self.found[key], saved.dtype, saved.size(), saved.stride(), int(saved.storage_offset()))

    def unpack(self, packed: Tensor | MovedTensor) -> Tensor:
        """The tensor; the first of a block sends for those of the block in front."""
        if isinstance(packed, Tensor):
            return packed
        self.begin()
        flat = packed.stored.read(self.offload)
        flat = flat if flat.dtype == packed.dtype else flat.view(packed.dtype)
        return flat.as_strided(packed.size, packed.stride, packed.offset)

    def begin(self) -> None:
        """The backward pass of the block."""
        if self.begun:
            return
        self.begun = True
        self.fetch()
        if self.before is not None and (before := self.before()) is not None:
            before.fetch()

    def fetch(self) -> None:
        """All that still has readers."""
        for one in self.sent:
            if (stored := one()) is not None and stored.readers > 0:
                stored.fetch(self.offload)

    def send(self) -> list[StoredStorage]:
        """The forward pass of the block is over."""
        found, self.found = list(self.found.values()), {}
        if not self.moves:
            return []
        for stored in found:
            stored.send(self.offload)
        self.sent = [ref(stored) for stored in found]
        return found


class Offload:
    """The calls of a stage's blocks. `inner` runs one."""

    def __init__(self, model: Transformer, inner: BlockCall, device: torch.device) -> None:
        self.inner, self.model = inner, model
        self.memory, self.out, self.back = HostMemory(), Lane(device), Lane(device)
        self.last: ref[KeptOfBlock] | None = None
        self.leaving: list[StoredStorage] = []

    def __call__(
        self, block: Block, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As the inner call."""
        if not torch.is_grad_enabled() or cache is not None:
            return self.inner(block, x, metadata, cache)
        blocks = self.model.blocks
        starts, moves = block is blocks[0], block is not blocks[-1]
        shared = [*block.parameters(), *block.buffers(), *_tensors_of(metadata)]
        if starts and not self.model.first:
            shared.append(x)  # the pipeline holds it
        stays = {key for tensor in shared if (key := _key(tensor)) is not None}
        units = [part for part in block.modules() if part is not block and isinstance(part, FSDPModule)]
        kept = KeptOfBlock(self, None if starts else self.last, moves, stays, units)
        self.last = ref(kept)
        try:
            with saving_by(SavedTensorHooks(kept.pack, kept.unpack)):
                found = self.inner(block, x, metadata, cache)
            sent = kept.send()
        finally:  # a forward pass that fails keeps nothing
            kept.found = {}
            self._let_go()
        self.leaving = sent
        return found

    def _let_go(self) -> None:
        leaving, self.leaving = self.leaving, []
        for stored in leaving:
            stored.let_go()


def _tensors_of(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors_of(getattr(part, field.name))


def _key(tensor: Tensor) -> int | None:
    """Of its storage; a sharded parameter has none here."""
    try:
        return compat.storage_key(tensor.untyped_storage())
    except NotImplementedError:
        return None
