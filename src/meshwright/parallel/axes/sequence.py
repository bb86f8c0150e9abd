"""The slices of a sequence that tensor-parallel ranks hold between the parts of a block (sp), and how they travel.

A sequence of S positions passes in n pieces. Each piece has its own collective, which overlaps with the products of the
next piece (layout.tp_chunks). A rank holds its slice of every piece:

    n = 1    rank 0: 0 1 2 3    rank 1: 4 5 6 7
    n = 2    rank 0: 0 1 4 5    rank 1: 2 3 6 7

Hence a gathered piece is in the order of the sequence. Layers between the parts work on each position alone, so the
order does not matter to them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parallel.groups.group import Group, Pending
from meshwright.spec.memory.held import takes

SEQUENCE = 1
"""The dim of x (B, S, D) that sp splits."""


@dataclass(frozen=True, slots=True)
class SequenceSlices:
    """Slices over the ranks of `group`. Without sp every rank holds all positions. `pieces`: Layout.tp_pieces."""

    group: Group
    sp: bool
    pieces: Callable[[int], int]

    def of_slice(self, x: Tensor) -> int:
        """Return the number of pieces of a sequence, given a rank's part x (B, S / t or S, D)."""
        return self.pieces(x.shape[SEQUENCE] * (self.group.size if self.sp else 1))

    def of_whole(self, x: Tensor) -> int:
        """Return the number of pieces of the sequence x (B, S, D)."""
        return self.pieces(x.shape[SEQUENCE])

    def mine(self, x: Tensor) -> Tensor:
        """Return this rank's slice (B, S / t, ...) of a tensor (B, S, ...) that every rank has."""
        size, index = self.group.size, self.group.index
        slices = [piece.chunk(size, SEQUENCE)[index] for piece in x.chunk(self.of_whole(x), SEQUENCE)]
        return slices[0] if len(slices) == 1 else torch.cat(slices, SEQUENCE)


class Gathering:
    """Slices x (B, S / t, D) on their way to every rank, a piece at a time, as the sequence (B, S, D)."""

    @takes("buffers")
    def __init__(self, group: Group, x: Tensor, pieces: int) -> None:
        self._whole: Tensor | None = None
        if pieces == 1:
            self._pending = [group.start_all_gather(x, SEQUENCE)]
            return
        self._whole = x.new_empty(resize(x.shape, group.size, 1))
        parts = zip(x.chunk(pieces, SEQUENCE), self._whole.chunk(pieces, SEQUENCE), strict=True)
        self._pending = [group.start_all_gather(slice_, SEQUENCE, into=part) for slice_, part in parts]

    def pieces(self) -> Iterator[Tensor]:
        """Yield each piece (B, S / n, D) once it has arrived."""
        for pending in self._pending:
            yield pending.wait()

    def whole(self) -> Tensor:
        """Wait for all pieces and return the sequence."""
        *_, last = self.pieces()
        return last if self._whole is None else self._whole


def gather(group: Group, x: Tensor, pieces: int) -> Tensor:
    """Gather slices x (B, S / t, D) to the sequence (B, S, D)."""
    return group.all_gather(x, SEQUENCE) if pieces == 1 else Gathering(group, x, pieces).whole()


class Scattering:
    """A sum of the ranks' parts (B, S, D) on its way to their slices (B, S / t, D), a piece at a time."""

    def __init__(self, group: Group, pieces: int) -> None:
        self.group, self.pieces = group, pieces
        self._pending: list[Pending] = []
        self._places: list[Tensor] = []
        self._out: Tensor | None = None

    @takes("buffers")
    def start(self, part: Tensor) -> None:
        """Start the next piece (B, S / n, D), which must not change before wait()."""
        if self.pieces > 1 and self._out is None:
            self._out = part.new_empty(resize(part.shape, self.pieces, self.group.size))
            self._places = list(self._out.chunk(self.pieces, SEQUENCE))
        into = self._places[len(self._pending)] if self._places else None
        self._pending.append(self.group.start_reduce_scatter(part, SEQUENCE, into=into))

    def start_all(self, whole: Tensor) -> "Scattering":
        """Start all pieces of a part (B, S, D)."""
        for piece in whole.chunk(self.pieces, SEQUENCE):
            self.start(piece)
        return self

    def wait(self) -> Tensor:
        """Return this rank's slice (B, S / t, D) of the sum."""
        *_, last = [pending.wait() for pending in self._pending]
        return last if self._out is None else self._out


def scatter(group: Group, x: Tensor, pieces: int) -> Tensor:
    """Sum each rank's part x (B, S, D), and return this rank's slice (B, S / t, D) of the sum."""
    return group.reduce_scatter(x, SEQUENCE) if pieces == 1 else Scattering(group, pieces).start_all(x).wait()


def resize(shape: Sequence[int], times: int, over: int) -> tuple[int, ...]:
    """Return the shape with a sequence `times` as long, cut into `over` parts."""
    return (*shape[:SEQUENCE], shape[SEQUENCE] * times // over, *shape[SEQUENCE + 1 :])
