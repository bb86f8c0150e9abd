"""Part of a quantized matrix (codes and scales) that tensor parallelism, expert parallelism and ZeRO-3 leave on a rank.

Experts and outputs are cut as plain numbers are. Inputs share scales by groups, and a cut may fall within a group. A
rank then holds the codes of its first group from the start of that group and drops `before` of them when it restores.
Scales that are codes themselves (double quantization) share outer scales in runs through the whole matrix. A rank holds
the outer scales of all runs, and knows the position of its own scales in the matrix.

ZeRO-3 shards the rest without knowing its structure: all tensors of a matrix form one run of lines of bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.quantization_schemes import WIDTHS, Scheme, Size, find_scheme
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.boxes import Box, boxes_of
from meshwright.spec.weights.inventory import Parameter, parameters

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
