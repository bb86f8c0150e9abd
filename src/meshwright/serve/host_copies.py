"""The memory of the host tier: for each slot what a block has in every layer. Pinned where the model is on a GPU."""

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from meshwright.serve.host_tier import Move


@final
class HostCopies:
    """Slots for the blocks of one cache. Copies from and to a GPU are put in its stream, in order; nobody waits."""

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
