"""Host copy of the training state, written to disk while training changes the original."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from meshwright.store.tensor_piece import Piece

SLAB_BYTES = 256 * 2**20
"""Size of the slabs in which memory is taken; a larger tensor gets its own. torch rounds pinned memory up to a power of
two, which could otherwise double its size."""
ALIGNMENT_BYTES = 64


class Staging:
    """Memory for the copy, taken once and reused.

    It is pinned for tensors on a GPU, so that they cross the bus at full speed.
    """

    def __init__(self) -> None:
        self.slabs: list[Tensor] = []

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors and pieces to host memory and wait for completion. The next copy overwrites them."""
        held = {name: tensor.held if isinstance(tensor, Piece) else tensor.detach() for name, tensor in tensors.items()}
        copies = self._views(held)
        for name, copy in copies.items():
            copy.copy_(held[name], non_blocking=True)
        if any(tensor.is_cuda for tensor in held.values()):
            torch.cuda.current_stream().synchronize()
        return {name: _like(tensor, copies[name]) for name, tensor in tensors.items()}

    def _views(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return consecutive views of the slabs, one per tensor. Slabs are added as needed."""
        pinned = any(tensor.is_cuda for tensor in held.values())
        remaining = sum(map(_aligned_bytes, held.values()))
        views, slab, used = {}, 0, 0
        for name, tensor in held.items():
            room = _aligned_bytes(tensor)
            while slab < len(self.slabs) and used + room > len(self.slabs[slab]):
                slab, used = slab + 1, 0
            if slab == len(self.slabs):
                size_bytes = max(room, min(SLAB_BYTES, remaining))
                self.slabs.append(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned))
            size_bytes = tensor.numel() * tensor.element_size()
            views[name] = self.slabs[slab][used : used + size_bytes].view(tensor.dtype).view(tensor.shape)
            used, remaining = used + room, remaining - room
        return views


def copied_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the host memory in bytes that a copy of these tensors and pieces needs."""
    return sum(_aligned_bytes(tensor.held if isinstance(tensor, Piece) else tensor) for tensor in tensors)


def _aligned_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor rounded up to ALIGNMENT_BYTES."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _like(tensor: Tensor, copy: Tensor) -> Tensor:
    return Piece(copy, tensor.box) if isinstance(tensor, Piece) else copy
