"""The way of rows to the experts of other ranks and back, in pieces, for a forward pass and for its gradients.

A piece is for an equal part of each rank's experts (layout.ep_chunks). On one way rows leave whole and arrive piece by
piece; on the way back they leave piece by piece and are joined at home. The gradient of either goes the other way:

    depart  (N k, D) -> a token a piece    all pieces leave            gradient: waits for all of them
    arrive  token -> (R, D)                waits, sorts by expert      gradient: leaves for home
    turn    (R, D) -> token                leaves for home             gradient: waits
    home    tokens -> (N k, D)             waits for all of them       gradient: all pieces leave

Whatever a model computes between two of them overlaps with the exchange: experts of one piece, and the shared experts.
Autograd goes back through the newest operations first, so the backward pass overlaps likewise, from the last piece to
the first. Tokens have no elements: they tell autograd what comes before what. The rows under way are held by the Way.
Only the orders of rows are kept for the backward pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.parallel.groups.group import Group, Pending
from meshwright.spec.memory.purpose import takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Rows of each piece that this rank sends to each rank of the group, and that each one sends here."""

    group: Group
    sent: Sequence[Sequence[int]]
    received: Sequence[Sequence[int]]
    overlaps: bool
    """True if anything is computed between a start and its wait."""


class Sorting(NamedTuple):
    """Order of a piece that has arrived (R, D). None = it is sorted already.

    sorted = arrived[order] is sorted by expert and then rank; arrived = sorted[inverse].
    """

    order: Tensor | None
    inverse: Tensor | None


class Way:
    """Rows under way between this rank and the others: at home (N k, D), at the experts (R, D) for each piece."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self._pending: list[Pending | None] = [None] * len(route.sent)
        self._home: Tensor | None = None
        self._places: Sequence[Tensor] = ()

    def depart(self, rows: Tensor, pieces: Iterable[int]) -> None:
        """Start all pieces of rows at home, which lie one behind the other, in this order."""
        route, parts = self.route, rows.split([sum(runs) for runs in self.route.sent])
        for piece in pieces:
            self._pending[piece] = route.group.start_all_to_all(
                parts[piece], route.sent[piece], route.received[piece], overlaps=route.overlaps
            )

    def arrive(self, piece: int) -> Tensor:
        """Wait for the rows of a piece, and return them."""
        return self._wait(piece)

    @takes("buffers")
    def turn(self, rows: Tensor, piece: int) -> None:
        """Start the way home of a piece, in the order of its arrival."""
        route = self.route
        # All pieces come home into one buffer, so nothing is joined at the end.
        if self._home is None:
            sizes = [sum(runs) for runs in route.sent]
            self._home = rows.new_empty(sum(sizes), *rows.shape[1:])
            self._places = self._home.split(sizes)
        self._pending[piece] = route.group.start_all_to_all(
            rows, route.received[piece], route.sent[piece], overlaps=route.overlaps, into=self._places[piece]
        )

    def home(self) -> Tensor:
        """Wait for all rows, and return them in the order in which they left."""
        for piece in range(len(self._pending)):
            self._wait(piece)
        rows, self._home, self._places = self._home, None, ()
        assert rows is not None
        return rows

    def _wait(self, piece: int) -> Tensor:
        pending, self._pending[piece] = self._pending[piece], None
        assert pending is not None
        return pending.wait()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> tuple[Tensor, ...]:
        ctx.way = way
        pieces = range(len(way.route.sent))
        way.depart(rows, pieces)
        return tuple(_token(rows) for _ in pieces)

    @staticmethod
    def backward(ctx: Any, *tokens: Tensor) -> Any:
        return ctx.way.home(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, way: Way, piece: int, order: Tensor | None, inverse: Tensor | None) -> Tensor:
        ctx.way, ctx.piece = way, piece
        ctx.save_for_backward(inverse)
        return _pick(way.arrive(piece), order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        ctx.way.turn(_pick(gradient, inverse), ctx.piece)
        return _token(gradient), None, None, None, None


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way, piece: int, order: Tensor | None, inverse: Tensor | None) -> Tensor:
        ctx.way, ctx.piece = way, piece
        ctx.save_for_backward(order)
        way.turn(_pick(rows, inverse), piece)
        return _token(rows)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return _pick(ctx.way.arrive(ctx.piece), order), None, None, None, None


class _Home(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, *tokens: Tensor) -> Tensor:
        ctx.way = way
        return way.home()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        pieces = range(len(ctx.way.route.sent))
        # Autograd visits the last piece first, so its gradient must leave first.
        ctx.way.depart(gradient, reversed(pieces))
        return None, *(_token(gradient) for _ in pieces)


def depart(rows: Tensor, way: Way) -> tuple[Tensor, ...]:
    """Send rows (N k, D), sorted by piece -> one token for each piece."""
    tokens: tuple[Tensor, ...] = _Depart.apply(rows, way)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return tokens


def arrive(token: Tensor, way: Way, piece: int, sorting: Sorting) -> Tensor:
    """Wait for the rows (R, D) of a piece, and sort them."""
    rows: Tensor = _Arrive.apply(token, way, piece, *sorting)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return rows


def turn(rows: Tensor, way: Way, piece: int, sorting: Sorting) -> Tensor:
    """Send sorted rows (R, D) of a piece home -> its token."""
    token: Tensor = _Turn.apply(rows, way, piece, *sorting)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return token


def home(tokens: Sequence[Tensor], way: Way) -> Tensor:
    """Wait for the rows (N k, D) at home, in the order in which they left."""
    rows: Tensor = _Home.apply(way, *tokens)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return rows


def _token(like: Tensor) -> Tensor:
    return like.new_empty(0)


@takes("buffers")
def _pick(rows: Tensor, order: Tensor | None) -> Tensor:
    return rows if order is None else rows.index_select(0, order)
