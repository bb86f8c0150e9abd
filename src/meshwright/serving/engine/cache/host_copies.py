"""Copies between host and device without a wait: numbers of a step, its tokens, blocks of the host tier.

A GPU copies beside the host's work only from and to pinned memory. With other memory torch waits for the copy, and so
for all work before it.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from typing import final

import torch
from torch import Tensor

from meshwright.serving.engine.cache.blocks import Move


def to_device(numbers: Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of the host, nested or not, as a tensor on a device, in one copy without a wait.

    torch keeps the pinned memory until the copy is done. An array of "q" is read in place, since torch looks at each
    number of a list, for 40 ns.
    """
    if isinstance(numbers, array) and numbers:
        host = torch.frombuffer(numbers, dtype=torch.int64)
    else:
        host = torch.tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@final
class HostReading:
    """Tensors on their way to the host. A GPU copies them on a separate stream, beside what follows."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start the copies behind all work in the current stream."""
        self._tensors, self._host = tensors, tensors
        self._arrived: torch.Event | None = None
        device = tensors[0].device
        if device.type != "cuda":
            return
        stream = _reading_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._arrived = stream.record_event()

    def read(self) -> Sequence[Tensor]:
        """Wait for the tensors and return them on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


@cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@final
class HostCopies:
    """Slots of host memory for the blocks of a cache, each with a block's content in every layer.

    They are pinned for a model on a GPU. Its copies are put into the GPU's stream, in order, without a wait.
    """

    def __init__(self, blocks: Sequence[Tensor], slots: int) -> None:
        """Allocate slots for the stores of a cache (`blocks`, each indexed by block)."""
        self._blocks = blocks
        self._slots = [
            torch.empty((slots, *store.shape[1:]), dtype=store.dtype, pin_memory=store.device.type == "cuda")
            for store in blocks
        ]

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        return sum(store.nbytes for store in self._slots)

    def save(self, block: int, slot: int) -> None:
        """Copy a block's content to a slot."""
        for store, host in zip(self._blocks, self._slots, strict=True):
            host[slot].copy_(store[block], non_blocking=True)

    def load(self, slot: int, block: int) -> None:
        """Copy a slot's content to a block."""
        for store, host in zip(self._blocks, self._slots, strict=True):
            store[block].copy_(host[slot], non_blocking=True)


def group_moves(moves: Iterable[Move]) -> list[list[Move]]:
    """Return the moves in order, with copies that may happen at once in one group, and others alone."""
    groups: list[list[Move]] = []
    targets = set[int]()
    for move in moves:
        needs_own_group = move.kind != "copy" or not targets or move.source in targets or move.target in targets
        if needs_own_group:
            groups.append([])
            targets.clear()
        groups[-1].append(move)
        if move.kind == "copy":
            targets.add(move.target)
    return groups
