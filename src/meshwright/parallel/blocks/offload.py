"""Offload of saved activations: what a block keeps for its backward pass is held in host memory.

A block's saved tensors are copied out when its forward pass ends, while the next block computes. Their device memory is
released at the end of that next block. They come back while the block behind makes its backward pass. The last block of
a stage keeps its own: its backward pass comes next.

Storages are moved, not tensors: each once, however many views of it are saved. Parameters, tensors that all blocks
share (rotary tables, masks) and the input that a stage received stay. Parameters that fully_shard gathers inside a
block (experts spread over ep) are recognized when they are there: it frees their storages before the block ends.

On a GPU two streams copy, one in each direction. Pinned buffers are reused from earlier blocks, so that a steady state
pins nothing new. Elsewhere (fake tensors of a dry run, a CPU without a second memory) copies are made in line, in the
same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright import compat
from meshwright.model.attention import AttentionMetadata, Past
from meshwright.model.seams import BlockCall
from meshwright.model.transformer import Block, Transformer
from meshwright.parallel.blocks.recompute import SavedTensorHooks, save_with
from meshwright.spec.memory.held import takes


class Lane:
    """One direction of copies between device and host."""

    def __init__(self, device: torch.device) -> None:
        real = device.type == "cuda" and torch.cuda.is_available()
        self.stream = torch.cuda.Stream(device) if real else None

    def copy(self, to: Tensor, source: Tensor, after: Any = None) -> Any:
        """Copy after the current stream's work so far, and after an event. Return the event of the copy's end."""
        if self.stream is None or compat.is_fake(source):
            to.copy_(source)
            return None
        # The source must have been computed, and a buffer read, before it is copied over.
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        if after is not None:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
        if to.is_cuda:  # the graph may be freed before the copy ends
            to.record_stream(self.stream)
        return self.stream.record_event()


def wait(event: Any) -> None:
    """Have the current stream wait for an event."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class HostBuffer:
    """Host memory, and the end of the last copy that read or wrote it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used: Any = None


class HostMemory:
    """Buffers by size, reused by later copies."""

    def __init__(self) -> None:
        self.free: dict[tuple[int, bool], list[HostBuffer]] = {}
        self.taken_bytes = 0
        """Bytes of all buffers, whether in use or not."""

    @takes("host")
    def take(self, source: Tensor) -> HostBuffer:
        """Return a buffer of the size of a flat tensor."""
        size, fake = source.numel() * source.element_size(), compat.is_fake(source)
        if buffers := self.free.get((size, fake)):
            return buffers.pop()
        self.taken_bytes += size
        pinned = source.is_cuda and not fake
        return HostBuffer(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned))

    def give(self, buffer: HostBuffer) -> None:
        """Put a buffer back for the next copy."""
        memory = buffer.memory
        self.free.setdefault((memory.numel(), compat.is_fake(memory)), []).append(buffer)


class StoredStorage:
    """A storage that a block has saved: on the device, in host memory, or in both."""

    def __init__(self, owner: "BlockActivations", flat: Tensor) -> None:
        self.owner, self.size, self.dtype, self.device = owner, flat.numel(), flat.dtype, flat.device
        self.on_device: Tensor | None = flat
        self.host: HostBuffer | None = None
        self.arrived: Any = None
        self.readers = 0

    def send(self, offload: "Offload") -> None:
        """Copy it to the host. On the device it stays until `release`."""
        assert self.on_device is not None
        self.host = offload.memory.take(self.on_device)
        # The buffer is free again once no node of the graph refers to this storage.
        finalize(self, offload.memory.give, self.host)
        self.host.used = offload.out.copy(self._host_view(), self.on_device, self.host.used)

    def release(self) -> None:
        """Free the device memory, after the copy."""
        if self.host is not None:
            wait(self.host.used)
            self.on_device = None

    def fetch(self, offload: "Offload") -> Tensor:
        """Start to copy it back if it is gone from the device."""
        if self.on_device is None:
            assert self.host is not None
            self.on_device = torch.empty(self.size, dtype=self.dtype, device=self.device)
            self.arrived = self.host.used = offload.back.copy(self.on_device, self._host_view(), self.host.used)
        return self.on_device

    def read(self, offload: "Offload") -> Tensor:
        """Return the flat tensor to one of its readers. The last one frees the device memory."""
        flat = self.fetch(offload)
        wait(self.arrived)
        self.readers -= 1
        if self.readers <= 0 and self.host is not None:
            self.on_device = None
        return flat

    def _host_view(self) -> Tensor:
        assert self.host is not None
        return self.host.memory.view(self.dtype)


class MovedTensor(NamedTuple):
    """Stand-in for a tensor in a node of the graph."""

    stored: StoredStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class BlockActivations:
    """Tensors that one call of a block has saved.

    Args:
        before: Those of the block in front, whose backward pass comes next.
        moves: Whether they go to host memory.
        stays: Keys of storages that are not moved.
        units: Modules of the block that gather their own parameters, which are not moved either.
    """

    def __init__(
        self,
        offload: "Offload",
        before: "ref[BlockActivations] | None",
        moves: bool,
        stays: set[int],
        units: Sequence[nn.Module],
    ) -> None:
        self.offload, self.before, self.moves, self.stays, self.units = offload, before, moves, stays, units
        self.storages: dict[int, StoredStorage] = {}
        self.sent: list[ref[StoredStorage]] = []
        self.backward_begun = False

    def pack(self, saved: Tensor) -> Tensor | MovedTensor:
        """Save an alias: a node that kept its own output would never be freed without a backward pass."""
        saved = saved.detach()
        storage = saved.untyped_storage()
        key = compat.storage_key(storage)
        if key in self.stays or not storage.nbytes():
            return saved
        if key not in self.storages:
            if any(key == _key(parameter) for unit in self.units for parameter in unit.parameters()):
                return saved
            flat = saved.as_strided((storage.nbytes() // saved.element_size(),), (1,), 0)
            self.storages[key] = StoredStorage(self, flat)
        self.storages[key].readers += 1
        return MovedTensor(self.storages[key], saved.dtype, saved.size(), saved.stride(), int(saved.storage_offset()))

    def unpack(self, packed: Tensor | MovedTensor) -> Tensor:
        """Return the tensor. The first call also fetches the tensors of the block in front."""
        if isinstance(packed, Tensor):
            return packed
        self.begin()
        flat = packed.stored.read(self.offload)
        flat = flat if flat.dtype == packed.dtype else flat.view(packed.dtype)
        return flat.as_strided(packed.size, packed.stride, packed.offset)

    def begin(self) -> None:
        """Start the backward pass of the block."""
        if self.backward_begun:
            return
        self.backward_begun = True
        self.fetch()
        if self.before is not None and (before := self.before()) is not None:
            before.fetch()

    def fetch(self) -> None:
        """Fetch every storage that still has readers."""
        for reference in self.sent:
            if (stored := reference()) is not None and stored.readers > 0:
                stored.fetch(self.offload)

    def send(self) -> list[StoredStorage]:
        """End the forward pass of the block: copy its storages to the host."""
        storages, self.storages = list(self.storages.values()), {}
        if not self.moves:
            return []
        for stored in storages:
            stored.send(self.offload)
        self.sent = [ref(stored) for stored in storages]
        return storages


class Offload:
    """Wrapper of the calls of a stage's blocks. `inner` runs one."""

    def __init__(self, model: Transformer, inner: BlockCall, device: torch.device) -> None:
        self.inner, self.model = inner, model
        self.memory, self.out, self.back = HostMemory(), Lane(device), Lane(device)
        self.last: ref[BlockActivations] | None = None
        self.leaving: list[StoredStorage] = []

    def __call__(
        self, block: Block, x: Tensor, metadata: AttentionMetadata, cache: Past | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run a block as the inner call does."""
        if not torch.is_grad_enabled() or cache is not None:
            return self.inner(block, x, metadata, cache)
        blocks = self.model.blocks
        starts, moves = block is blocks[0], block is not blocks[-1]
        # All of these live on anyway, so moving them would free nothing.
        shared = [*block.parameters(), *block.buffers(), *_tensors_of(metadata)]
        if starts and not self.model.first:
            shared.append(x)  # the pipeline keeps it anyway
        stays = {key for tensor in shared if (key := _key(tensor)) is not None}
        units = [part for part in block.modules() if part is not block and isinstance(part, FSDPModule)]
        activations = BlockActivations(self, None if starts else self.last, moves, stays, units)
        self.last = ref(activations)
        try:
            with save_with(SavedTensorHooks(activations.pack, activations.unpack)):
                output = self.inner(block, x, metadata, cache)
            sent = activations.send()
        finally:  # a failed forward pass keeps nothing
            activations.storages = {}
            for stored in self.leaving:  # of the block before: its copies had this block's time to end
                stored.release()
            self.leaving = []
        self.leaving = sent
        return output


def _tensors_of(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors_of(getattr(part, field.name))


def _key(tensor: Tensor) -> int | None:
    """Return the key of a tensor's storage. None for a sharded parameter."""
    try:
        return compat.storage_key(tensor.untyped_storage())
    except NotImplementedError:
        return None
