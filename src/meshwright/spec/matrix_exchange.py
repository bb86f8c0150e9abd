"""Who orthogonalizes which matrix, and what travels there and back: Muon's work, dealt over a pipeline stage's ranks.

Muon needs a whole matrix, of which ZeRO, tp and ep leave each rank a piece. Every matrix of a stage
(`Parameter.matrices`) has one owner among the stage's ranks (data, context and tensor parallel ones). The owner gathers
the pieces of the direction, orthogonalizes, and gives each holder the piece that it updates:

    ranks of a stage   piece of A   ->  owner of A: whole A, Newton-Schulz  ->  piece of A   every rank that holds it
                       piece of B   ->  owner of B                          ->  piece of B

A matrix that a rank holds whole (an expert) is orthogonalized by one of those ranks and is not gathered. The others are
dealt out so that all ranks have as much work. Matrices go in rounds, so that a rank never has many at once.

Read by the engine (training/muon.py), which runs it, and by the planner, which counts its bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heapreplace
from operator import attrgetter
from typing import NamedTuple

from meshwright.spec.held import held_of, parameters_of
from meshwright.spec.inventory import Parameter
from meshwright.spec.layout import Layout
from meshwright.spec.places import ranks_along
from meshwright.spec.shape import ModelShape

STAGE = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the ranks that hold the same layers."""
ROUND_ELEMENTS = 2**24
"""Elements of matrices that a rank has in a round, unless one alone is larger: 32 MiB in bf16."""
ITERATIONS = 5
"""Of Newton-Schulz (Jordan et al. 2024)."""
WORK_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of an element that is orthogonalized and travels, by recipe.precision: bf16 but for fp32 runs, so that those agree
under all layouts to the last digits. fp16 would lose small directions."""


class WholeMatrix(NamedTuple):
    """One matrix that is orthogonalized: of a parameter, or of an expert of a stack."""

    name: str
    expert: int
    """0 where there is no stack."""
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


class MatrixPiece(NamedTuple):
    """A part of a whole matrix: `rows` x `columns` elements from (`row`, `column`) on."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def slices(self) -> tuple[slice, slice]:
        """To cut the piece out of the whole."""
        return slice(self.row, self.row + self.rows), slice(self.column, self.column + self.columns)


Tiles = dict[MatrixPiece, tuple[int, ...]]
"""The pieces of a matrix that have elements -> places of the ranks that hold each, ascending."""


def flop(rows: int, columns: int) -> float:
    """Of orthogonalizing one matrix: in each iteration X X', the square of that, and its product with X."""
    small, large = sorted((rows, columns))
    return ITERATIONS * (4.0 * small * small * large + 2.0 * small**3)


class HeldPart(NamedTuple):
    """A rank's own piece of a matrix of a round, as rows of what it holds of the parameter (R, columns)."""

    peer: int
    """The owner."""
    matrix: WholeMatrix
    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


class OwnedPart(NamedTuple):
    """A piece of a matrix that a rank owns; `peer` sends or receives it."""

    peer: int
    owned: int
    """Place of the matrix among those owned in the round."""
    piece: MatrixPiece

    @property
    def rows(self) -> int:
        """Of the piece."""
        return self.piece.rows

    @property
    def columns(self) -> int:
        """Of the piece."""
        return self.piece.columns

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.piece.numel


@dataclass(slots=True)
class ExchangeRound:
    """One rank's part of a round. What goes to or comes from one rank is in the same order on both."""

    gathers: bool = False
    """Whether any rank gathers from another; then all take part in that exchange."""
    scatters: bool = False
    owned: list[WholeMatrix] = field(default_factory=list)
    held: list[HeldPart] = field(default_factory=list)
    """By owner: what comes back."""
    sent: list[HeldPart] = field(default_factory=list)
    """By owner: of those, what this rank and none of its equals sends."""
    gathered: list[OwnedPart] = field(default_factory=list)
    """By sender."""
    scattered: list[OwnedPart] = field(default_factory=list)
    """By receiver."""


@dataclass(frozen=True, slots=True)
class DealtMatrix:
    """A matrix with its pieces, owner and round."""

    matrix: WholeMatrix
    tiles: Tiles
    owner: int
    round: int

    def sender(self, piece: MatrixPiece) -> int:
        """Of the ranks that hold a piece, the owner itself or the nearest to it."""
        return min(self.tiles[piece], key=lambda place: (abs(place - self.owner), place))

    @property
    def gathers(self) -> bool:
        """Whether the owner lacks any of it."""
        return any(self.owner not in holders for holders in self.tiles.values())

    @property
    def scatters(self) -> bool:
        """Whether another rank holds any of it."""
        return any(holders != (self.owner,) for holders in self.tiles.values())


def stage_ranks(layout: Layout, rank: int) -> tuple[int, ...]:
    """The ranks with the same layers as a rank, this one included."""
    return ranks_along(layout, STAGE, rank)


@lru_cache(maxsize=8)
def dealt(shape: ModelShape, layout: Layout, rank: int, trained: frozenset[str] | None = None) -> list[DealtMatrix]:
    """All matrices of a rank's stage, the same on all its ranks, in the order in which they go. `trained`: names of the
    parameters that learn; None = all."""
    ranks = stage_ranks(layout, rank)
    if rank != ranks[0]:
        return dealt(shape, layout, ranks[0], trained)
    some = [one for one in parameters_of(shape, layout, rank) if trained is None or one.name in trained]
    known: dict[tuple[object, ...], list[Tiles]] = {}
    matrices: list[tuple[WholeMatrix, Tiles]] = []
    for one in some:
        if one.matrices is None:
            continue
        kind = one.shape, one.dims, one.axes, one.group
        if kind not in known:
            known[kind] = _tiles(one, shape, layout, ranks)
        _, rows, columns = one.matrices
        matrices += [(WholeMatrix(one.name, e, rows, columns), tiles) for e, tiles in enumerate(known[kind])]
    return _in_rounds(_owned(matrices, len(ranks)))


def _tiles(parameter: Parameter, shape: ModelShape, layout: Layout, ranks: Sequence[int]) -> list[Tiles]:
    """Of each matrix of a parameter."""
    assert parameter.matrices is not None
    found: list[dict[MatrixPiece, list[int]]] = [{} for _ in range(parameter.matrices[0])]
    for place, rank in enumerate(ranks):
        for expert, piece, _ in _own(parameter, shape, layout, rank):
            found[expert].setdefault(piece, []).append(place)
    return [{piece: tuple(places) for piece, places in tiles.items()} for tiles in found]


def _own(parameter: Parameter, shape: ModelShape, layout: Layout, rank: int) -> Iterator[tuple[int, MatrixPiece, int]]:
    """(expert, piece, its first row in what the rank holds) of each matrix that a rank holds any of."""
    [one] = held_of([parameter], shape, layout, rank)
    box = one.own_box
    if not box.numel:
        return
    first, experts = (box.offsets[0], box.sizes[0]) if len(box.sizes) > 2 else (0, 1)
    piece = MatrixPiece(*box.offsets[-2:], *box.sizes[-2:])
    for place in range(experts):
        yield first + place, piece, place * piece.rows


def _owned(matrices: list[tuple[WholeMatrix, Tiles]], ranks: int) -> list[tuple[WholeMatrix, Tiles, int]]:
    """With the place of each owner: first those that some ranks hold whole, by one of these; then the others, the most
    expensive first, each by the rank that has least to do."""

    def able(tiles: Tiles) -> Sequence[int]:
        return next(iter(tiles.values())) if len(tiles) == 1 else range(ranks)

    order = sorted(matrices, key=lambda one: (len(able(one[1])), -flop(one[0].rows, one[0].columns)))
    loads, queue = [0.0] * ranks, list[tuple[float, int]]()
    found = []
    for matrix, tiles in order:
        places, work = able(tiles), flop(matrix.rows, matrix.columns)
        if len(places) < ranks:
            owner = min(places, key=lambda place: (loads[place], place))
            loads[owner] += work
        else:
            if not queue:
                queue = [(load, place) for place, load in enumerate(loads)]
                heapify(queue)
            load, owner = queue[0]
            heapreplace(queue, (load + work, owner))
        found.append((matrix, tiles, owner))
    return found


def _in_rounds(matrices: list[tuple[WholeMatrix, Tiles, int]]) -> list[DealtMatrix]:
    """Each owner's matrices in their order, as many in a round as there is room for."""
    most = round_elements(
        max((matrix.numel for matrix, *_ in matrices), default=0),
        max((len(holders) for _, tiles, _ in matrices for holders in tiles.values()), default=1),
    )
    filled: dict[int, tuple[int, int]] = {}
    found = []
    for matrix, tiles, owner in matrices:
        number, elements = filled.get(owner, (0, 0))
        if elements and elements + matrix.numel > most:
            number, elements = number + 1, 0
        filled[owner] = number, elements + matrix.numel
        found.append(DealtMatrix(matrix, tiles, owner, number))
    return sorted(found, key=lambda one: one.round)


def round_elements(largest: int, copies: int) -> int:
    """Most elements of matrices that a rank owns in a round, of which each is given to so many ranks."""
    return max(largest, ROUND_ELEMENTS // copies)


def rounds(
    shape: ModelShape, layout: Layout, rank: int, trained: frozenset[str] | None = None
) -> tuple[ExchangeRound, ...]:
    """What a rank does in each round; as many on all ranks of its stage."""
    all_dealt = dealt(shape, layout, rank, trained)
    here = stage_ranks(layout, rank).index(rank)
    own = _own_pieces(all_dealt, shape, layout, rank)
    found = [ExchangeRound() for _ in range(max((one.round for one in all_dealt), default=-1) + 1)]
    for one in all_dealt:
        now = found[one.round]
        now.gathers |= one.gathers
        now.scatters |= one.scatters
        held = own.get((one.matrix.name, one.matrix.expert))
        if held is not None:
            piece, start = held
            part = HeldPart(one.owner, one.matrix, start, piece.rows, piece.columns)
            now.held.append(part)
            if one.sender(piece) == here:
                now.sent.append(part)
        if one.owner == here:
            index = len(now.owned)
            now.owned.append(one.matrix)
            for piece, holders in one.tiles.items():
                now.gathered.append(OwnedPart(one.sender(piece), index, piece))
                now.scattered += [OwnedPart(place, index, piece) for place in holders]
    by_peer = attrgetter("peer")
    for now in found:
        now.held.sort(key=by_peer)
        now.sent.sort(key=by_peer)
        now.gathered.sort(key=by_peer)
        now.scattered.sort(key=by_peer)
    return tuple(found)


def _own_pieces(
    matrices: Sequence[DealtMatrix], shape: ModelShape, layout: Layout, rank: int
) -> dict[tuple[str, int], tuple[MatrixPiece, int]]:
    """(name, expert) -> (piece, its first row) of what a rank holds."""
    names = {one.matrix.name for one in matrices}
    return {
        (parameter.name, expert): (piece, start)
        for parameter in parameters_of(shape, layout, rank)
        if parameter.name in names
        for expert, piece, start in _own(parameter, shape, layout, rank)
    }
