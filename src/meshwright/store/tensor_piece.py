"""A rank's box of a global tensor, in the form that torch's distributed checkpoint reads and writes."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from meshwright import compat
from meshwright.spec.weights.boxes import Box


class Piece(Tensor):
    """Tensor with the shape and dtype of the global one that holds only this rank's box, `held`. No arithmetic.

    torch.distributed.checkpoint calls the four double-underscored methods of a tensor whose parts lie on several
    ranks. Ranks with the same box all offer it; it is written once.
    """

    held: Tensor
    box: Box

    @staticmethod
    def __new__(cls, held: Tensor, box: Box) -> "Piece":
        """Wrap `held`, which has the sizes of the box. Its memory is shared."""
        assert tuple(held.shape) == box.sizes, (held.shape, box)
        piece = compat.wrapper(cls, box.whole, held)
        assert isinstance(piece, Piece)
        piece.held, piece.box = held, box
        return piece

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function that is not a class method
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{operation} on a piece of a tensor: take .held")

    def __repr__(self) -> str:  # type: ignore[override]  # torch has an option more
        """Return box and dtype. Tensor's own representation would compute."""
        return f"Piece({self.box}, {self.held.dtype})"

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.box.offsets), torch.Size(self.box.sizes))

    def __create_write_items__(self, name: str, tensor: Tensor) -> list[WriteItem]:
        """Return one write item, or none for an empty box."""
        if not self.held.numel():
            return []
        data = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties.create_from_tensor(self.held),
            size=torch.Size(self.box.whole),
        )
        index = MetadataIndex(name, torch.Size(self.box.offsets))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the box to be read, or none for an empty one."""
        return [self._chunk()] if self.held.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the local memory that is read or written."""
        return self.held


def piece(held: Tensor, box: Box | None) -> Tensor:
    """Return a Piece, or the tensor itself when this rank holds all of it."""
    return held if box is None or box.sizes == box.whole else Piece(held, box)
