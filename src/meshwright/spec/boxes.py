"""Which part of every parameter a rank holds: a box in the whole tensor, from the shared inventory and the layout.

The inventory names, per dim, the axis that splits it. Heads are split whole; where there are fewer key heads than tp
ranks, tp / kv_heads neighbours hold the same one. Vocabulary and ffn need not divide: the first ranks get one more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from meshwright.spec.inventory import Parameter, parameters, tp_holders
from meshwright.spec.layout import Layout
from meshwright.spec.places import expert_place, place_of
from meshwright.spec.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """`sizes` elements from `offsets` on, of a tensor of shape `whole`; `owner` is one rank of those that hold it."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    owner: bool = True

    @property
    def slices(self) -> tuple[slice, ...]:
        """To cut the box out of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


def share(length: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, size) of part `index` of `length` things in `parts` nearly equal runs; the first ones are the longer."""
    size, more = divmod(length, parts)
    return index * size + min(index, more), size + (index < more)


def rows_of(rows: int, ranks: int, index: int) -> tuple[int, int]:
    """(offset, size) of the rows of part `index` as fully_shard cuts them: ceil(rows / ranks) each, the last less."""
    size = -(-rows // ranks)
    start = min(rows, size * index)
    return start, min(rows, start + size) - start


def sharded_dim(sizes: Sequence[int], ranks: int) -> int:
    """The dim along which ZeRO cuts a tensor of these sizes: 0, but for a stack of experts (three dims) too few for
    all ranks. That is cut inside its experts, along the first dim which divides: fully_shard pads dim 0 only."""
    if len(sizes) < 3 or rows_of(sizes[0], ranks, ranks - 1)[1]:
        return 0
    return next((dim for dim in range(1, len(sizes)) if sizes[dim] % ranks == 0), 0)


def shard(box: Box, ranks: int, index: int) -> Box:
    """What ZeRO leaves of a box on rank `index` of those that share it."""
    dim = sharded_dim(box.sizes, ranks)
    start, size = rows_of(box.sizes[dim], ranks, index)
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += start
    sizes[dim] = size
    return replace(box, offsets=tuple(offsets), sizes=tuple(sizes))


def heads_of(heads: int, parts: int, index: int) -> tuple[int, int]:
    """(first, number) of the heads that part `index` holds; with fewer heads than parts neighbours hold the same."""
    return (index * heads // parts, 1) if heads < parts else share(heads, parts, index)


def boxes(shape: ModelShape, layout: Layout, rank: int) -> dict[str, Box]:
    """Parameter name -> what tensor and expert parallelism leave on a rank, for all layers (whatever the stage)."""
    return boxes_of(parameters(shape), shape, layout, rank)


def boxes_of(some: Iterable[Parameter], shape: ModelShape, layout: Layout, rank: int) -> dict[str, Box]:
    """The same of some parameters."""
    tp = place_of(layout, rank)["tp"]
    ep, *_ = expert_place(layout, rank)
    return {parameter.name: _box(parameter, shape, layout, tp, ep) for parameter in some}


def _box(parameter: Parameter, shape: ModelShape, layout: Layout, tp: int, ep: int) -> Box:
    offsets, sizes = [], []
    for letter, axis, length in zip(parameter.dims, parameter.axes, parameter.shape, strict=True):
        offset, size = 0, length
        if axis == "ep":
            offset, size = share(length, layout.ep, ep)
        elif axis == "tp" and parameter.group == "expert" and layout.ep > 1:
            pass  # whole experts, spread over ep instead
        elif axis == "tp" and letter in "HK":
            heads = shape.heads if letter == "H" else shape.kv_heads
            first, number = heads_of(heads, layout.tp, tp)
            offset, size = first * length // heads, number * length // heads
        elif axis == "tp":
            offset, size = share(length, layout.tp, tp)
        offsets.append(offset)
        sizes.append(size)
    owner = tp % tp_holders(parameter, shape, layout) == 0
    return Box(whole=parameter.shape, offsets=tuple(offsets), sizes=tuple(sizes), owner=owner)
