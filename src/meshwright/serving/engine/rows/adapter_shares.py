"""The part of an adapter on each rank. Rank 0 reads the adapter, and broadcasts each tensor whole.

The cuts are those of training (spec/weights/boxes.py): A is split like its matrix's inputs, B like the outputs, and
experts like their stacks. First come integers: the adapter's number, its rank, and which of its possible tensors it
has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import final

import torch
from torch import Tensor

from meshwright.parallel.groups.group import Group
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import LoRAShape, ModelShape
from meshwright.spec.weights.boxes import boxes_of
from meshwright.spec.weights.inventory import Parameter, parameters


def adapter_words(number: int, tensors: Mapping[str, Tensor], lora: LoRAShape, shape: ModelShape) -> list[int]:
    """Return the integers that AdapterRoom reads."""
    known = possible_parts(shape, lora.rank)
    return [number, lora.rank, *(index for index, part in enumerate(known) if part.name in tensors)]


@final
class AdapterRoom:
    """Memory for this rank's part of an adapter, allocated before any tensor is sent."""

    def __init__(
        self, words: Sequence[int], shape: ModelShape, layout: Layout, rank: int, dtype: torch.dtype
    ) -> None:  # fmt: skip
        """Allocate the memory. `words`: see adapter_words."""
        self.number, width, *indices = words
        known = possible_parts(shape, width)
        self._wanted = [known[index] for index in indices]
        self._boxes = boxes_of(self._wanted, shape, layout, rank)
        self._local = {name: torch.empty(box.sizes, dtype=dtype) for name, box in self._boxes.items()}
        self._whole = torch.empty(max((prod(part.shape) for part in self._wanted), default=0), dtype=dtype)

    def filled(self, tensors: Mapping[str, Tensor] | None, group: Group) -> dict[str, Tensor]:
        """Receive this rank's part of whole `tensors`, which only rank 0 has."""
        for part in self._wanted:
            whole = self._whole[: prod(part.shape)].view(part.shape)
            if tensors is not None:
                whole.copy_(tensors[part.name])
            group.broadcast(whole.view(torch.uint8))
            self._local[part.name].copy_(whole[self._boxes[part.name].slices])
        return self._local


def possible_parts(shape: ModelShape, width: int) -> list[Parameter]:
    """List all parts that an adapter of this rank (`width`) may have, in order."""
    return [part for part in parameters(replace(shape.base, lora=LoRAShape(rank=width))) if part.adapts]
