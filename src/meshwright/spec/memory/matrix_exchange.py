"""Distribution of Muon's work over the ranks of a pipeline stage: which rank orthogonalizes which matrix.

Muon needs a whole matrix, of which ZeRO, tp and ep leave each rank a piece. Every matrix of a stage
(`Parameter.matrices`) has one owner among the stage's ranks (data, context and tensor parallel ones). The owner gathers
the pieces of the direction, orthogonalizes, and sends each holder the piece that it updates:

    ranks of a stage   piece of A   ->  owner of A: whole A, Newton-Schulz  ->  piece of A   every rank that holds it
                       piece of B   ->  owner of B                          ->  piece of B

A matrix that some ranks hold whole (an expert) is orthogonalized by one of them and not gathered. The others are dealt
so that all ranks have equal work. Matrices go in rounds, to limit how many a rank has at once.

The engine runs this (training/optimizer/muon.py), and the planner counts its bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heapreplace
from operator import attrgetter
from typing import NamedTuple

from meshwright.spec.layout.layout import Layout, ranks_along
from meshwright.spec.memory.held import list_held_of, parameters_of
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.inventory import Parameter

STAGE = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the ranks that hold the same layers."""
ROUND_ELEMENTS = 2**24
"""Most elements of matrices that a rank has in a round, unless one matrix is larger: 32 MiB in bf16."""
ITERATIONS = 5
"""Iterations of Newton-Schulz (Jordan et al. 2024)."""
WORK_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element that is orthogonalized and exchanged, by recipe.precision. bf16, except that fp32 runs agree under
all layouts to the last digits. fp16 would lose small directions."""


class WholeMatrix(NamedTuple):
    """One matrix to orthogonalize: a parameter, or one expert of a stack."""

    name: str
    expert: int
    """Index in the stack. 0 = no stack."""
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


class MatrixPiece(NamedTuple):
    """Part of a whole matrix: `rows` x `columns` elements from (`row`, `column`) on."""

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
        """Index that cuts the piece out of the whole matrix."""
        return slice(self.row, self.row + self.rows), slice(self.column, self.column + self.columns)


Tiles = dict[MatrixPiece, tuple[int, ...]]
"""Non-empty pieces of a matrix -> stage indices of the ranks that hold each, ascending."""


def flop(rows: int, columns: int) -> float:
    """Return the FLOP of orthogonalizing one matrix. Each iteration takes X X', its square, and its product with X."""
    small, large = sorted((rows, columns))
    return ITERATIONS * (4.0 * small * small * large + 2.0 * small**3)


class HeldPart(NamedTuple):
    """A rank's piece of a matrix of a round, as rows of its part of the parameter (R, columns)."""

    peer: int
    """Owner of the matrix."""
    matrix: WholeMatrix
    start: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


class OwnedPart(NamedTuple):
    """Piece of a matrix that this rank owns. `peer` sends or receives it."""

    peer: int
    owned: int
    """Index of the matrix among those owned in the round."""
    piece: MatrixPiece

    @property
    def rows(self) -> int:
        """Rows of the piece."""
        return self.piece.rows

    @property
    def columns(self) -> int:
        """Columns of the piece."""
        return self.piece.columns

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.piece.numel


@dataclass(slots=True)
class ExchangeRound:
    """One rank's part of a round. Pieces between two ranks are in the same order on both."""

    gathers: bool = False
    """Any rank gathers from another. All ranks then take part in that exchange."""
    scatters: bool = False
    owned: list[WholeMatrix] = field(default_factory=list)
    held: list[HeldPart] = field(default_factory=list)
    """Pieces that come back, by owner."""
    sent: list[HeldPart] = field(default_factory=list)
    """Those of the held pieces that this rank sends, among the ranks that hold the same, by owner."""
    gathered: list[OwnedPart] = field(default_factory=list)
    """Pieces that this rank receives as an owner, by sender."""
    scattered: list[OwnedPart] = field(default_factory=list)
    """Pieces that this rank sends back as an owner, by receiver."""


@dataclass(frozen=True, slots=True)
class DealtMatrix:
    """A matrix with its pieces, owner and round."""

    matrix: WholeMatrix
    tiles: Tiles
    owner: int
    round: int

    def sender(self, piece: MatrixPiece) -> int:
        """Return the rank that sends a piece: the owner if it holds it, or else the nearest holder."""
        # near ranks mostly share a node, whose links are fast
        return min(self.tiles[piece], key=lambda index: (abs(index - self.owner), index))

    @property
    def gathers(self) -> bool:
        """The owner lacks a piece."""
        return any(self.owner not in holders for holders in self.tiles.values())

    @property
    def scatters(self) -> bool:
        """Another rank holds a piece."""
        return any(holders != (self.owner,) for holders in self.tiles.values())


def stage_ranks(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the ranks with the same layers as a rank, this one included."""
    return ranks_along(layout, STAGE, rank)


@lru_cache(maxsize=8)
def deal_matrices(
    shape: ModelShape, layout: Layout, rank: int, trained: frozenset[str] | None = None
) -> list[DealtMatrix]:
    """Return all matrices of a rank's stage in order, the same on all its ranks. `trained` = None for all names."""
    ranks = stage_ranks(layout, rank)
    # All ranks of a stage have the same matrices: count them once, for its first rank.
    if rank != ranks[0]:
        return deal_matrices(shape, layout, ranks[0], trained)
    tiles_by_kind: dict[tuple[object, ...], list[Tiles]] = {}
    matrices: list[tuple[WholeMatrix, Tiles]] = []
    for parameter in parameters_of(shape, layout, rank):
        if parameter.matrices is None or (trained is not None and parameter.name not in trained):
            continue
        # Layers repeat: equal parameters are cut alike.
        kind = parameter.shape, parameter.dims, parameter.axes, parameter.group
        if kind not in tiles_by_kind:
            tiles_by_kind[kind] = _tiles(parameter, shape, layout, ranks)
        _, rows, columns = parameter.matrices
        for expert, tiles in enumerate(tiles_by_kind[kind]):
            matrices.append((WholeMatrix(parameter.name, expert, rows, columns), tiles))
    return _assign_rounds(_assign_owners(matrices, len(ranks)))


def _tiles(parameter: Parameter, shape: ModelShape, layout: Layout, ranks: Sequence[int]) -> list[Tiles]:
    assert parameter.matrices is not None
    tiles_of: list[dict[MatrixPiece, list[int]]] = [{} for _ in range(parameter.matrices[0])]
    for index, rank in enumerate(ranks):
        for expert, piece, _ in _pieces_of(parameter, shape, layout, rank):
            tiles_of[expert].setdefault(piece, []).append(index)
    return [{piece: tuple(holders) for piece, holders in tiles.items()} for tiles in tiles_of]


def _pieces_of(
    parameter: Parameter, shape: ModelShape, layout: Layout, rank: int
) -> Iterator[tuple[int, MatrixPiece, int]]:
    """Yield (expert, piece, its first row in the held part) of each matrix of which a rank holds a piece."""
    [part] = list_held_of([parameter], shape, layout, rank)
    box = part.owned_box
    if not box.numel:  # ZeRO may leave a rank nothing of a matrix with few rows
        return
    first, experts = (box.offsets[0], box.sizes[0]) if len(box.sizes) > 2 else (0, 1)
    piece = MatrixPiece(*box.offsets[-2:], *box.sizes[-2:])
    for index in range(experts):
        yield first + index, piece, index * piece.rows


def _assign_owners(matrices: list[tuple[WholeMatrix, Tiles]], ranks: int) -> list[tuple[WholeMatrix, Tiles, int]]:
    """Return the matrices with the stage index of each owner.

    Matrices that some ranks hold whole come first, each owned by one of these. The others follow, the most expensive
    first, each owned by the rank with the least work.
    """

    def candidates(tiles: Tiles) -> Sequence[int]:
        return next(iter(tiles.values())) if len(tiles) == 1 else range(ranks)

    order = sorted(matrices, key=lambda entry: (len(candidates(entry[1])), -flop(entry[0].rows, entry[0].columns)))
    # Owners with a choice follow in the queue of least work, which starts from the loads that experts leave.
    loads, queue = [0.0] * ranks, list[tuple[float, int]]()
    owned = []
    for matrix, tiles in order:
        owners, work = candidates(tiles), flop(matrix.rows, matrix.columns)
        if len(owners) < ranks:
            owner = min(owners, key=lambda index: (loads[index], index))
            loads[owner] += work
        else:
            if not queue:
                queue = [(load, index) for index, load in enumerate(loads)]
                heapify(queue)
            load, owner = queue[0]
            heapreplace(queue, (load + work, owner))
        owned.append((matrix, tiles, owner))
    return owned


def _assign_rounds(matrices: list[tuple[WholeMatrix, Tiles, int]]) -> list[DealtMatrix]:
    """Assign rounds: each owner's matrices in their order, as many per round as fit."""
    most = round_elements(
        max((matrix.numel for matrix, *_ in matrices), default=0),
        max((len(holders) for _, tiles, _ in matrices for holders in tiles.values()), default=1),
    )
    filled: dict[int, tuple[int, int]] = {}
    dealt_matrices = []
    for matrix, tiles, owner in matrices:
        number, elements = filled.get(owner, (0, 0))
        # an empty round takes any matrix: one may be larger than a round
        if elements and elements + matrix.numel > most:
            number, elements = number + 1, 0
        filled[owner] = number, elements + matrix.numel
        dealt_matrices.append(DealtMatrix(matrix, tiles, owner, number))
    return sorted(dealt_matrices, key=lambda entry: entry.round)


def round_elements(largest: int, copies: int) -> int:
    """Return the largest number of elements that a rank owns in a round, each sent to `copies` ranks."""
    # what is sent grows with the copies, and its buffers stay the same
    return max(largest, ROUND_ELEMENTS // copies)


def rounds(
    shape: ModelShape, layout: Layout, rank: int, trained: frozenset[str] | None = None
) -> tuple[ExchangeRound, ...]:
    """Return a rank's part of each round, equally many on all ranks of its stage."""
    all_dealt = deal_matrices(shape, layout, rank, trained)
    index = stage_ranks(layout, rank).index(rank)
    names = {entry.matrix.name for entry in all_dealt}
    pieces = {
        (parameter.name, expert): (piece, start)
        for parameter in parameters_of(shape, layout, rank)
        if parameter.name in names
        for expert, piece, start in _pieces_of(parameter, shape, layout, rank)
    }
    exchange_rounds = [ExchangeRound() for _ in range(max((entry.round for entry in all_dealt), default=-1) + 1)]
    for entry in all_dealt:
        current = exchange_rounds[entry.round]
        current.gathers |= entry.gathers
        current.scatters |= entry.scatters
        if (held := pieces.get((entry.matrix.name, entry.matrix.expert))) is not None:
            piece, start = held
            part = HeldPart(entry.owner, entry.matrix, start, piece.rows, piece.columns)
            current.held.append(part)
            if entry.sender(piece) == index:
                current.sent.append(part)
        if entry.owner == index:
            owned = len(current.owned)
            current.owned.append(entry.matrix)
            for piece, holders in entry.tiles.items():
                current.gathered.append(OwnedPart(entry.sender(piece), owned, piece))
                current.scattered += [OwnedPart(holder, owned, piece) for holder in holders]
    # Both sides of an exchange list their pieces in the order of the matrices: a stable sort by peer keeps it.
    by_peer = attrgetter("peer")
    for current in exchange_rounds:
        for parts in (current.held, current.sent, current.gathered, current.scattered):
            parts.sort(key=by_peer)
    return tuple(exchange_rounds)
