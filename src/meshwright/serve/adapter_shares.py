"""What a rank holds of an adapter, and how all ranks get it: the first one reads it, and sends each tensor whole.

The cuts are those of training (spec/boxes.py): A of a matrix whose inputs are split is split by them, B of one whose
outputs are split, and experts as their stacks. What is sent before are whole numbers: the adapter's number, its rank,
and which of the tensors that it could have it has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.parallel.group import Group
from meshwright.spec.boxes import Box, boxes_of
from meshwright.spec.inventory import Parameter, parameters
from meshwright.spec.layout import Layout
from meshwright.spec.lora import LoRAShape
from meshwright.spec.shape import ModelShape


def adapter_words(number: int, tensors: Mapping[str, Tensor], lora: LoRAShape, shape: ModelShape) -> list[int]:
    """What `own_adapter` reads."""
    known = possible_parts(shape, lora.rank)
    return [number, lora.rank, *(place for place, one in enumerate(known) if one.name in tensors)]


def own_adapter(
    words: Sequence[int], tensors: Mapping[str, Tensor] | None, shape: ModelShape, layout: Layout, group: Group,
    dtype: torch.dtype,
) -> tuple[int, dict[str, Tensor]]:  # fmt: skip
    """(number, this rank's part) of an adapter whose whole `tensors` the first rank has, and others do not."""
    number, width, *places = words
    known = possible_parts(shape, width)
    boxes = boxes_of((known[place] for place in places), shape, layout, group.index)
    found = {}
    for one in (known[place] for place in places):
        whole = torch.empty(one.shape, dtype=dtype) if tensors is None else tensors[one.name].contiguous()
        group.broadcast(whole.view(torch.uint8))
        found[one.name] = _cut(whole, boxes[one.name])
    return number, found


def _cut(whole: Tensor, box: Box) -> Tensor:
    return whole[box.slices].clone() if box.sizes != tuple(whole.shape) else whole


def possible_parts(shape: ModelShape, width: int) -> list[Parameter]:
    """All parts that an adapter of a rank may have, in order."""
    return [one for one in parameters(replace(shape.base, lora=LoRAShape(rank=width))) if one.adapts]
