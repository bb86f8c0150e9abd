"""What tensor and expert parallelism, and ZeRO-3, leave of a matrix that is held as codes and scales.

Experts and outputs are cut as numbers are. Inputs share scales by groups, and a cut may fall within one: a rank then
holds the codes of its first group from that group's beginning, `before` of which it drops where it restores. Scales
that are codes themselves share theirs in runs through the whole matrix: a rank has those of all runs, and knows where
in the matrix its own scales stand.

ZeRO-3 shares what that leaves without knowing what it is: all tensors of a matrix as one run of lines of bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from meshwright.spec.boxes import Box
from meshwright.spec.quantization_schemes import WIDTHS, Scheme, Size
from meshwright.spec.scheme_names import scheme_named

BYTE_OF_CODES = 8
"""So many codes end with a byte, however many bits each has."""
LINE_BYTES = 16
"""Of a line of a run that ranks share. Each tensor in it begins with a line, so that it can be read where it stands,
whatever its dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlaces:
    """Where in a whole matrix a rank's scales stand."""

    row: int
    """The first."""
    group: int
    """The first of a row."""
    groups: int
    """Of a whole row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodesCut:
    """The part of a matrix, or of a stack of them, that a box is of."""

    scheme: Scheme
    box: Box

    @property
    def first_code(self) -> int:
        """The first code of a row that is held."""
        unit = self.scheme.group or (BYTE_OF_CODES if self.scheme.packed else 1)
        return self.box.offsets[-1] // unit * unit

    @property
    def before(self) -> int:
        """Codes of a row that are held for others' sake, in front."""
        return self.box.offsets[-1] - self.first_code

    @property
    def width(self) -> int:
        """Codes of a row that are held."""
        return self.before + self.box.sizes[-1]

    @property
    def groups(self) -> slice:
        """Of a row, those whose scales are held."""
        first = self.first_code // self.scheme.group if self.scheme.group else 0
        return slice(first, first + self.scheme.groups(self.width))

    @property
    def places(self) -> ScalePlaces:
        """Of its scales."""
        return ScalePlaces(
            row=self.box.offsets[-2], group=self.groups.start, groups=self.scheme.groups(self.box.whole[-1])
        )

    @property
    def is_whole(self) -> bool:
        """Whether nothing of a matrix is cut off; of a stack there may be."""
        return self.box.sizes[-2:] == self.box.whole[-2:]

    def sizes(self) -> dict[str, Size]:
        """Of the tensors that are held, as Scheme.sizes."""
        *stack, rows, _ = self.box.sizes
        found = self.scheme.sizes(rows, self.width, stack)
        if "outer" in found:
            rows, columns = self.box.whole[-2:]
            found["outer"] = self.scheme.sizes(rows, columns, stack)["outer"]
        return found


def bytes_of_codes(name: str, box: Box, ranks: int = 1) -> int:
    """Of what a rank holds of a matrix in a scheme of this name, whose run so many ranks share; 0 where the name is
    empty."""
    scheme = scheme_named(name)
    if scheme is None:
        return 0
    if ranks > 1:
        return share_bytes(lines_of_codes(name, box), ranks)
    return nbytes(CodesCut(scheme=scheme, box=box).sizes().values())


def lines_of_codes(name: str, box: Box) -> int:
    """Of its run."""
    scheme = scheme_named(name)
    return 0 if scheme is None else lines(CodesCut(scheme=scheme, box=box).sizes().values())


def lines(sizes: Iterable[Size]) -> int:
    """Of a run of tensors."""
    return sum(-(-nbytes((size,)) // LINE_BYTES) for size in sizes)


def share_bytes(count: int, ranks: int) -> int:
    """Of each rank's share of a run of so many lines; the last one is padded."""
    return -(-count // ranks) * LINE_BYTES


def nbytes(sizes: Iterable[Size]) -> int:
    """Of tensors."""
    return sum(prod(dims) * WIDTHS[dtype] for dims, dtype in sizes)
