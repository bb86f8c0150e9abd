"""What a rank holds of an adapter, and how all ranks get it: the first one reads it, and sends each tensor whole.

The cuts are those of training (spec/boxes.py): A of a matrix whose inputs are split is split by them, B of one whose
outputs are split, and experts as their stacks. What is sent before are whole numbers: the adapter's number, its rank,
and which of the tensors that it could have it has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import final

import torch
from torch import Tensor

from meshwright.parallel.group import Group
from meshwright.spec.boxes import boxes_of
from meshwright.spec.inventory import Parameter, parameters
from meshwright.spec.layout import Layout
from meshwright.spec.lora import LoRAShape
from meshwright.spec.shape import ModelShape


def adapter_words(number: int, tensors: Mapping[str, Tensor], lora: LoRAShape, shape: ModelShape) -> list[int]:
    """What AdapterRoom reads."""
    known = possible_parts(shape, lora.rank)
    return [number, lora.rank, *(place for place, one in enumerate(known) if one.name in tensors)]


@final
class AdapterRoom:
    """Memory for this rank's part of an adapter, which is there before any tensor is sent."""

    def __init__(
        self, words: Sequence[int], shape: ModelShape, layout: Layout, rank: int, dtype: torch.dtype
    ) -> None:  # fmt: skip
        """`words`: see adapter_words."""
        self.number, width, *places = words
        known = possible_parts(shape, width)
        self._wanted = [known[place] for place in places]
        self._boxes = boxes_of(self._wanted, shape, layout, rank)
        self._own = {name: torch.empty(box.sizes, dtype=dtype) for name, box in self._boxes.items()}
        self._whole = torch.empty(max((prod(one.shape) for one in self._wanted), default=0), dtype=dtype)

    def filled(self, tensors: Mapping[str, Tensor] | None, group: Group) -> dict[str, Tensor]:
        """This rank's part of whole `tensors` that the first rank has, and others do not."""
        for one in self._wanted:
            whole = self._whole[: prod(one.shape)].view(one.shape)
            if tensors is not None:
                whole.copy_(tensors[one.name])
            group.broadcast(whole.view(torch.uint8))
            self._own[one.name].copy_(whole[self._boxes[one.name].slices])
        return self._own


def possible_parts(shape: ModelShape, width: int) -> list[Parameter]:
    """All parts that an adapter of a rank may have, in order."""
    return [one for one in parameters(replace(shape.base, lora=LoRAShape(rank=width))) if one.adapts]
