"""A copy of the state in host memory, so that it can be written while training changes the state."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from meshwright.store.tensor_piece import Piece

SLAB_BYTES = 256 * 2**20
"""Memory is taken in slabs of so much (a larger tensor has one alone): torch rounds pinned memory up to a power of
two, which would otherwise cost up to as much again."""
ALIGNMENT_BYTES = 64


class Staging:
    """Memory for the copy, taken at the first and used again by every later one; pinned where tensors lie on a GPU, so
    that they come over the bus at its full speed."""

    def __init__(self) -> None:
        self.slabs: list[Tensor] = []

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors and pieces in host memory, complete when this returns; the next copy overwrites them."""
        held = {name: tensor.held if isinstance(tensor, Piece) else tensor.detach() for name, tensor in tensors.items()}
        copies = self._places(held)
        for name, copy in copies.items():
            copy.copy_(held[name], non_blocking=True)
        if any(tensor.is_cuda for tensor in held.values()):
            torch.cuda.current_stream().synchronize()
        return {name: _like(tensor, copies[name]) for name, tensor in tensors.items()}

    def _places(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A view of the slabs for each tensor, one behind the other; slabs are added where there are too few."""
        pinned = any(tensor.is_cuda for tensor in held.values())
        left = sum(map(_room, held.values()))
        found, slab, used = {}, 0, 0
        for name, tensor in held.items():
            room = _room(tensor)
            while slab < len(self.slabs) and used + room > len(self.slabs[slab]):
                slab, used = slab + 1, 0
            if slab == len(self.slabs):
                size_bytes = max(room, min(SLAB_BYTES, left))
                self.slabs.append(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned))
            size_bytes = tensor.numel() * tensor.element_size()
            found[name] = self.slabs[slab][used : used + size_bytes].view(tensor.dtype).view(tensor.shape)
            used, left = used + room, left - room
        return found


def copied_bytes(tensors: Iterable[Tensor]) -> int:
    """Host memory for a copy of these tensors and pieces."""
    return sum(_room(tensor.held if isinstance(tensor, Piece) else tensor) for tensor in tensors)


def _room(tensor: Tensor) -> int:
    """Bytes with the gap to the next place."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _like(tensor: Tensor, copy: Tensor) -> Tensor:
    return Piece(copy, tensor.box) if isinstance(tensor, Piece) else copy
