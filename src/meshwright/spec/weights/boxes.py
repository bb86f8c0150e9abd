"""Part of each parameter that a rank holds: a box in the whole tensor, from the inventory and the layout.

The inventory names, per dim, the axis that splits it. Heads are split whole. With fewer key heads than tp ranks,
tp / kv_heads neighbours hold the same one. Vocabulary and ffn need not divide: the first ranks get one more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from meshwright.spec.layout.layout import Layout, expert_place, place_of
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.inventory import Parameter, parameters, tp_holders


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Slice of a tensor of shape `whole`.

    `sizes` elements from `offsets` on. `owner` marks one of the ranks that hold it.
    """

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    owner: bool = True

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that cuts the box out of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


def share(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return (offset, size) of part `index` when `length` is cut into nearly equal runs. The first ones are longer."""
    size, more = divmod(length, parts)
    return index * size + min(index, more), size + (index < more)


def rows_of(rows: int, ranks: int, index: int) -> tuple[int, int]:
    """Return (offset, size) of part `index` as fully_shard cuts rows: ceil(rows / ranks) each, the last fewer."""
    size = -(-rows // ranks)
    start = min(rows, size * index)
    return start, min(rows, start + size) - start


def sharded_dim(sizes: Sequence[int], ranks: int) -> int:
    """Return the dim along which ZeRO cuts a tensor of these sizes.

    This is 0, except for a stack of experts (three dims) that are fewer than the ranks. fully_shard pads dim 0 only, so
    that stack is cut inside its experts, along the first dim that divides.
    """
    if len(sizes) < 3 or rows_of(sizes[0], ranks, ranks - 1)[1]:
        return 0
    return next((dim for dim in range(1, len(sizes)) if sizes[dim] % ranks == 0), 0)


def shard(box: Box, ranks: int, index: int) -> Box:
    """Return the part of a box that ZeRO leaves on rank `index` of the ranks that share it."""
    dim = sharded_dim(box.sizes, ranks)
    start, size = rows_of(box.sizes[dim], ranks, index)
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += start
    sizes[dim] = size
    return replace(box, offsets=tuple(offsets), sizes=tuple(sizes))


def heads_of(heads: int, parts: int, index: int) -> tuple[int, int]:
    """Return (first, number) of the heads of part `index`. If there are fewer heads, neighbours share one."""
    return (index * heads // parts, 1) if heads < parts else share(heads, parts, index)


def boxes(shape: ModelShape, layout: Layout, rank: int) -> dict[str, Box]:
    """Return parameter name -> the box that tensor and expert parallelism leave on a rank, for all stages."""
    return boxes_of(parameters(shape), shape, layout, rank)


def boxes_of(selected: Iterable[Parameter], shape: ModelShape, layout: Layout, rank: int) -> dict[str, Box]:
    """Return the boxes of the selected parameters, as `boxes` does."""
    tp = place_of(layout, rank)["tp"]
    ep, *_ = expert_place(layout, rank)
    return {parameter.name: _box(parameter, shape, layout, tp, ep) for parameter in selected}


def _box(parameter: Parameter, shape: ModelShape, layout: Layout, tp: int, ep: int) -> Box:
    offsets, sizes = [], []
    for letter, axis, length in zip(parameter.dims, parameter.axes, parameter.shape, strict=True):
        offset, size = 0, length
        if axis == "ep":
            offset, size = share(length, layout.ep, ep)
        elif axis == "tp" and parameter.group == "expert" and layout.ep > 1:
            pass  # whole experts, spread over ep instead
        elif axis == "tp" and letter in "HK":
            # Heads are split whole: an offset in elements is one in heads times their width.
            heads = shape.heads if letter == "H" else shape.kv_heads
            first, number = heads_of(heads, layout.tp, tp)
            offset, size = first * length // heads, number * length // heads
        elif axis == "tp":
            offset, size = share(length, layout.tp, tp)
        offsets.append(offset)
        sizes.append(size)
    # Of neighbours that hold the same part, the first owns it.
    owner = tp % tp_holders(parameter, shape, layout) == 0
    return Box(whole=parameter.shape, offsets=tuple(offsets), sizes=tuple(sizes), owner=owner)
