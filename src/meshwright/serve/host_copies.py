"""Copies between the host and the device that nobody waits for: numbers of a step, its tokens, blocks of the host tier.

A GPU copies beside the host's work only where the host's memory is pinned. From other memory torch waits for the copy,
and so for all work before it.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from typing import final

import torch
from torch import Tensor

from meshwright.serve.host_tier import Move


def to_device(numbers: Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of the host, nested or not, as a tensor on a device, in one copy that the host does not wait for.
    torch keeps the pinned memory until the copy is done. An array of "q" is read as it lies: torch looks at each number
    of a list, which takes 40 ns."""
    if isinstance(numbers, array) and numbers:
        host = torch.frombuffer(numbers, dtype=torch.int64)
    else:
        host = torch.tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@final
class HostReading:
    """Tensors on their way to the host. On a GPU they are copied on a stream of their own, beside what follows."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begin behind all work that the current stream has so far."""
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
        """Return them on the host, as soon as they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


@cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@final
class HostCopies:
    """Slots of host memory for the blocks of one cache: for each what a block has in every layer. Pinned where the
    model is on a GPU. Copies from and to a GPU are put in its stream, in order; nobody waits."""

    def __init__(self, blocks: Sequence[Tensor], slots: int) -> None:
        """`blocks`: all that a cache keeps, by blocks."""
        self._blocks = blocks
        self._slots = [
            torch.empty((slots, *one.shape[1:]), dtype=one.dtype, pin_memory=one.device.type == "cuda")
            for one in blocks
        ]

    @property
    def bytes(self) -> int:
        """Of all slots."""
        return sum(one.nbytes for one in self._slots)

    def save(self, block: int, slot: int) -> None:
        """What a block has, to a slot."""
        for kept, host in zip(self._blocks, self._slots, strict=True):
            host[slot].copy_(kept[block], non_blocking=True)

    def load(self, slot: int, block: int) -> None:
        """And back."""
        for kept, host in zip(self._blocks, self._slots, strict=True):
            kept[block].copy_(host[slot], non_blocking=True)


def grouped(moves: Iterable[Move]) -> list[list[Move]]:
    """Moves in the same order: copies that may happen at once together, others alone."""
    found: list[list[Move]] = []
    targets = set[int]()
    for move in moves:
        apart = move.kind != "copy" or not targets or move.source in targets or move.target in targets
        if apart:
            found.append([])
            targets.clear()
        found[-1].append(move)
        if move.kind == "copy":
            targets.add(move.target)
    return found
