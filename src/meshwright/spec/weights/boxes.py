"""Part of each parameter that a rank holds: a box in the whole tensor, its codes and scales, its optimizer states.

The inventory names, per dim, the axis that splits it. Heads are split whole. With fewer key heads than tp ranks,
tp / kv_heads neighbours hold the same one. Vocabulary and ffn need not divide: the first ranks get one more.

Codes of a quantized matrix are cut as plain numbers are, by experts and outputs. Inputs share scales by groups, and a
cut may fall within a group. A rank then holds the codes of its first group from the start of that group and drops
`before` of them when it restores. Scales that are codes themselves (double quantization) share outer scales in runs
through the whole matrix. A rank holds the outer scales of all runs, and knows the position of its own scales in the
matrix. ZeRO-3 shards the rest without knowing its structure: all tensors of a matrix form one run of lines of bytes.

Moments of the optimizer are stored in one of three forms:

    fp32   4 bytes for each moment
    bf16   2, rounded stochastically
    int8   1, an index into a code book, and one fp32 scale for each block of a row (Dettmers et al. 2022,
           arXiv:2110.02861); a parameter of fewer than SMALL elements stays in fp32, as in bitsandbytes

AdamW has two moments per parameter, Muon one per matrix (`Parameter.matrices`). A block is a run of a row, the last dim
of a parameter. Cuts along other dims (ZeRO, column-parallel tp, ep) keep blocks whole, so no layout changes a number. A
cut inside a row must fall between blocks (`cut_blocks`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

from meshwright.spec.layout.layout import Layout, expert_place, place_of
from meshwright.spec.model.quantization_schemes import WIDTHS, Scheme, Size, find_scheme
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


BYTE_OF_CODES = 8
"""Codes after which a byte is complete, for any number of bits per code."""
LINE_BYTES = 16
"""Bytes of a line of the sharded run. Each tensor in it starts on a new line, which aligns it for any dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlaces:
    """Position of a rank's scales in the whole matrix."""

    row: int
    """First row."""
    group: int
    """First group of a row."""
    groups: int
    """Groups of a whole row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodesCut:
    """Codes and scales behind a box of a matrix, or of a stack of matrices."""

    scheme: Scheme
    box: Box

    @property
    def first_code(self) -> int:
        """First held code of a row."""
        # Without groups the held codes begin where a byte does.
        unit = self.scheme.group or (BYTE_OF_CODES if self.scheme.packed else 1)
        return self.box.offsets[-1] // unit * unit

    @property
    def before(self) -> int:
        """Held codes of a row in front of the box, needed to complete a group or a byte."""
        return self.box.offsets[-1] - self.first_code

    @property
    def width(self) -> int:
        """Held codes of a row."""
        return self.before + self.box.sizes[-1]

    @property
    def groups(self) -> slice:
        """Groups of a row whose scales are held."""
        first = self.first_code // self.scheme.group if self.scheme.group else 0
        return slice(first, first + self.scheme.groups(self.width))

    @property
    def places(self) -> ScalePlaces:
        """Position of the held scales."""
        return ScalePlaces(
            row=self.box.offsets[-2], group=self.groups.start, groups=self.scheme.groups(self.box.whole[-1])
        )

    @property
    def is_whole(self) -> bool:
        """Whole matrices are held, though perhaps not all of a stack."""
        return self.box.sizes[-2:] == self.box.whole[-2:]

    def sizes(self) -> dict[str, Size]:
        """Return the sizes of the held tensors, as Scheme.sizes does."""
        *stack, rows, _ = self.box.sizes
        sizes = self.scheme.sizes(rows, self.width, stack)
        # Outer scales run through the whole matrix, so every rank holds all of them.
        if "outer" in sizes:
            rows, columns = self.box.whole[-2:]
            sizes["outer"] = self.scheme.sizes(rows, columns, stack)["outer"]
        return sizes


def bytes_of_codes(name: str, box: Box, ranks: int = 1) -> int:
    """Return the number of bytes that a rank holds of a quantized matrix. 0 for an empty scheme name."""
    scheme = find_scheme(name)
    if scheme is None:
        return 0
    if ranks > 1:
        return share_bytes(lines_of_codes(name, box), ranks)
    return nbytes(CodesCut(scheme=scheme, box=box).sizes().values())


def lines_of_codes(name: str, box: Box) -> int:
    """Return the number of lines of a matrix's run."""
    scheme = find_scheme(name)
    return 0 if scheme is None else lines(CodesCut(scheme=scheme, box=box).sizes().values())


def lines(sizes: Iterable[Size]) -> int:
    """Return the number of lines of a run of tensors."""
    return sum(-(-nbytes((size,)) // LINE_BYTES) for size in sizes)


def share_bytes(count: int, ranks: int) -> int:
    """Return the number of bytes of each rank's share of a run. The last share is padded."""
    return -(-count // ranks) * LINE_BYTES


def nbytes(sizes: Iterable[Size]) -> int:
    """Return the number of bytes of tensors of these sizes."""
    return sum(prod(dims) * WIDTHS[dtype] for dims, dtype in sizes)


class SharedScales(NamedTuple):
    """Scales that tensor-parallel ranks find together to round their parts of a matrix, or of a stack, like the whole.

    A rank that holds a whole run of inputs with one scale finds it alone. If inputs are cut within runs (W_o, W_down),
    the ranks take the maximum of their own ranges, which is exact. Scales that are codes themselves have a mean over
    the whole matrix, so every rank needs all scales. Whole experts, spread over ep, and matrices that ZeRO gathers
    before use need none of this.
    """

    numbers: int = 0
    """Numbers whose maximum the ranks take each time the matrix is rounded, in fp32. 0 = each finds its own scales."""
    rows: bool = False
    """Rows of the activations that it multiplies are cut, too."""
    within_groups: bool = False
    """Runs of inputs that share a scale are cut."""


@lru_cache(maxsize=4096)
def shared_scales(parameter: Parameter, shape: ModelShape, scheme: Scheme, tp: int, ep: int = 1) -> SharedScales:
    """Return the scales of a matrix that `tp` ranks find together.

    All ranks must get the same answer, although the box of one of them may be whole.
    """
    if tp == 1 or "tp" not in parameter.axes or (ep > 1 and "ep" in parameter.axes):
        return SharedScales()
    boxes = [boxes_of((parameter,), shape, Layout(tp=tp), rank)[parameter.name] for rank in range(tp)]
    *stack, rows, columns = parameter.shape
    by_rows, by_columns = (any(box.sizes[dim] < box.whole[dim] for box in boxes) for dim in (-2, -1))
    within = by_columns and any(box.offsets[-1] % (scheme.group or columns) for box in boxes)
    if not (within or (scheme.scales == "double" and (by_rows or by_columns))):
        return SharedScales(rows=by_columns)
    # With zeros the ranks need both ends of a range, not the largest absolute number alone.
    sides = 1 if scheme.zeros == "fixed" else 2
    return SharedScales(sides * prod(stack) * rows * scheme.groups(columns), by_columns, within)


def rounded_matrices(shape: ModelShape) -> Iterable[Parameter]:
    """Return one matrix of each kind that schemes apply to, whatever its layer."""
    kinds: dict[tuple[str, tuple[int, ...]], Parameter] = {}
    for parameter in parameters(shape):
        if parameter.matrices is not None:
            kinds.setdefault((parameter.name.removeprefix(f"layers.{parameter.layer}."), parameter.shape), parameter)
    return kinds.values()


SMALL = 4096
"""Size of a whole parameter, in elements, below which its moments stay in fp32 (bitsandbytes' min_8bit_size)."""
BLOCK, LEAST_BLOCK = 256, 32
"""Elements of a block: of a row that no layout cuts, and the least."""
SCALE_BYTES = 4
"""Bytes of a block's fp32 scale."""
WORK_BYTES = 32
"""Temporary bytes per element updated by plain code: moments, weight and gradient in fp32, random bits, indices."""
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentFormat:
    """Storage of the moments of one parameter. `block` = 0: without scales."""

    dtype: str
    """fp32, bf16 or int8."""
    block: int = 0
    moments: int = 2
    """2 for AdamW: means of the gradient and of its square. 1 for Muon: mean of the gradient."""

    @property
    def element_bytes(self) -> int:
        """Bytes per element of all moments together."""
        return self.moments * MOMENT_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of the scales per block, all moments together."""
        return self.moments * SCALE_BYTES if self.block else 0

    def nbytes(self, sizes: tuple[int, ...]) -> int:
        """Return the number of bytes of the moments of a piece of these sizes."""
        blocks = prod(self.scale_sizes(sizes)) if self.block else 0
        return self.element_bytes * prod(sizes) + self.block_bytes * blocks

    def scale_sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of the tensor of scales of a piece."""
        return *sizes[:-1], -(-sizes[-1] // self.block)

    def box(self, state: str, box: Box) -> Box:
        """Return the box of a state (`moment1`, `moment1_scale`, ...) for the box of its parameter."""
        if not state.endswith("_scale"):
            return box
        offsets = (*box.offsets[:-1], box.offsets[-1] // self.block)
        sizes, whole = self.scale_sizes(box.sizes), self.scale_sizes(box.whole)
        return replace(box, whole=whole, offsets=offsets, sizes=sizes)


@dataclass(frozen=True, slots=True)
class StateStorage:
    """Settings of a recipe for optimizer states (`Recipe.storage`)."""

    moments: str = "fp32"
    masters: bool = True
    """16-bit weights have an fp32 copy, which is updated."""
    optimizer: str = "adamw"
    """adamw or muon."""

    @property
    def narrow(self) -> bool:
        """Any state is stored in less than fp32."""
        return self.moments != "fp32" or not self.masters

    def by_muon(self, parameter: Parameter) -> bool:
        """Return whether Muon updates a parameter, rather than AdamW."""
        return self.optimizer == "muon" and parameter.matrices is not None

    def format_of(self, parameter: Parameter) -> MomentFormat:
        """Return the storage of the moments of a parameter, the same on every rank of every layout."""
        moments = 1 if self.by_muon(parameter) else 2
        if self.moments != "int8":
            return MomentFormat(dtype=self.moments, moments=moments)
        if parameter.numel < SMALL or len(parameter.shape) == 1:  # ZeRO cuts a vector anywhere
            return MomentFormat(dtype="fp32", moments=moments)
        return MomentFormat(dtype="int8", block=_block(parameter), moments=moments)


FP32_STATES = StateStorage()


def _block(parameter: Parameter) -> int:
    """Return BLOCK, or for rows that tp may cut, the largest power of two that 8 ranks can share, else 4, else 2."""
    if parameter.axes[-1] != "tp":
        return BLOCK
    shared = (gcd(parameter.shape[-1], tp * BLOCK) // tp for tp in (8, 4, 2))
    return next((block for block in shared if block >= LEAST_BLOCK), BLOCK)


@lru_cache(maxsize=4096)
def cut_blocks(shape: ModelShape, tp: int, ep: int, sharers: int) -> tuple[str, int, int] | None:
    """Return (parameter, row elements, block) of the first block that a layout would cut. None = no cut."""
    storage = StateStorage("int8")
    held = boxes(shape, Layout(dp_shard=ep, tp=tp, ep=ep), 0)
    for parameter in parameters(shape):
        block, sizes = storage.format_of(parameter).block, held[parameter.name].sizes
        row, whole = sizes[-1], parameter.shape[-1]
        if not block or not parameter.trained:
            continue
        if row < whole and (row % block or whole % row):
            return parameter.name, row, block
        if parameter.group == "expert" and sharded_dim(sizes, sharers) == len(sizes) - 1 and row // sharers % block:
            return parameter.name, row // sharers, block
    return None
