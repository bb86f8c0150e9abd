"""Expert parallelism (GShard, Lepikhin et al. 2020, arXiv:2006.16668), dropless: tokens go to their experts and back.

Rank r of `ep` holds experts r X/ep .. (r + 1) X/ep - 1, and every rank has its own tokens. A layer's forward pass:

    counts    (X,) rows for each expert, by all-to-all: every rank then knows how many rows arrive from whom
    there     rows, sorted by expert and so by rank, by all-to-all; on arrival sorted by local expert
    experts   as on one device, over the rows of all ranks
    back      put back in the order of arrival, and by all-to-all to where they came from

The backward pass goes both ways again (`Way`). Rows travel in pieces, each for an equal part of every rank's
experts: one piece computes while the next is under way. Each expert sees all its rows at once, in the same order as in
one piece. The first half of the shared experts runs while rows come, the second while they return
(model/feed_forward.py).

Every rank calls the same collectives in the same order, however tokens are routed. A rank without rows takes part with
none, and its experts get gradients of zero.

An expert's gradient is the sum over the tokens of all ep ranks, so it must not be reduced over ep again. The ranks that
hold the same experts (`expert_shard`, `dp_replicate`) sum theirs.

In each of the four exchanges a rank sends its rows for other ranks, of D elements each. In the forward pass these are
about N k (ep - 1)/ep rows. The counts are 8 bytes for each expert of other ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.kernels.experts.experts import Counts, groups_on_device
from meshwright.model.feed_forward import Experts, MoE
from meshwright.model.seams import Dispatch
from meshwright.parallel.groups.group import Group, Pending, find_group
from meshwright.spec.memory.held import takes
from meshwright.spec.model.shape import MoEShape


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
    """Rows under way between this rank and the others: at home (N k, D), at the experts (R, D) for each piece.

    On one way rows leave whole and arrive piece by piece; on the way back they leave piece by piece and are joined at
    home. The gradient of either goes the other way:

        depart  (N k, D) -> a token a piece    all pieces leave            gradient: waits for all of them
        arrive  token -> (R, D)                waits, sorts by expert      gradient: leaves for home
        turn    (R, D) -> token                leaves for home             gradient: waits
        home    tokens -> (N k, D)             waits for all of them       gradient: all pieces leave

    Whatever a model computes between two of them overlaps with the exchange: experts of one piece, and the shared
    experts. Autograd goes back through the newest operations first, so the backward pass overlaps likewise, from the
    last piece to the first. Tokens have no elements: they tell autograd what comes before what. Only the orders of rows
    are kept for the backward pass.
    """

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


def apply_expert_parallel(model: nn.Module, group: Group, pieces: Callable[[int], int] = lambda rows: 1) -> None:
    """Spread every mixture of experts in `model` (or `model` itself) over the ranks of `group`.

    Stacks of all X experts are cut to this rank's part, values included; stacks of X/ep are taken as this rank's part.
    `pieces`: Layout.ep_pieces, by the rows of a rank. Every rank must then run the same passes over as many tokens,
    evaluation too. The dispatch reads lengths of runs, so it must run outside of compiled code, like the experts of one
    device.
    """
    if group.size == 1:
        return
    for module in model.modules():
        if isinstance(module, MoE):
            _cut(module.experts, module.moe.experts, group)
            module.seams.dispatch = ExpertParallel(group, module.moe, pieces).dispatch


def apply_sequence_groups(model: nn.Module, *groups: Group) -> None:
    """Have the balance loss see whole sequences, of which the ranks of `groups` (cp; tp with sp) hold equal parts.

    The loss of each sequence (B,) is then the same on each rank and equals one device's. A rank still adds its part to
    the step's loss: the balance loss divided by the product of the groups' sizes. Gradients, summed over the ranks,
    then equal one device's.
    """
    present = [group for group in groups if group.size > 1]
    for module in model.modules():
        if isinstance(module, MoE) and present:
            module.seams.over_sequence = partial(reduce, _mean_over, present)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arriving:
    """Sizes and orders of the rows that arrive at this rank, by piece.

    `counts_on_host` and `counts` (pieces, X/ep/pieces): rows for each local expert, on the host and on the device.
    `sortings`: how each piece is sorted. `keys`: those of its sorted rows, for the dropout of adapters.
    """

    way: Way
    counts_on_host: list[list[int]]
    counts: Tensor
    sortings: list[Sorting]
    keys: list[Tensor | None]


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Replacement of Experts.compute when experts lie on other ranks."""

    group: Group
    moe: MoEShape
    pieces: Callable[[int], int]

    @property
    def dispatch(self) -> Dispatch:
        """The functions that a model calls."""
        return Dispatch(
            ordered=self.ordered,
            send=self.send,
            compute=self.compute,
            receive=lambda computed: home(*computed),
            travels=True,
        )

    def ordered(self, choices: Tensor) -> Tensor:
        """Map experts (N k,) to their positions when sorted by piece, rank and expert."""
        pieces = self.pieces(len(choices))
        if pieces == 1:
            return choices
        places = torch.arange(self.moe.experts, device=choices.device).view(pieces, self.group.size, -1)
        return places.transpose(0, 1).flatten()[choices]

    def send(
        self, experts: Experts, rows: Tensor, counts: Tensor, keys: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Arriving]:
        """Send rows (N k, D) in that order. `counts` (X,): rows of each expert. `keys` (N k,): of rows, for dropout."""
        size, pieces = self.group.size, self.pieces(len(rows))
        runs = [len(counts) // size] * size
        # Counts go ahead of the rows: a rank must know how much it will receive.
        arriving = self.group.all_to_all(counts, runs, runs)
        # The host waits once, for the counts of both directions.
        leaving_counts, arriving_counts = experts.seams.counts_on_host(torch.stack((counts, arriving)), len(rows))
        way = Way(
            Route(
                group=self.group,
                sent=[[sum(run) for run in ranks] for ranks in _regroup(leaving_counts, size, pieces)],
                received=[[sum(run) for run in ranks] for ranks in _regroup(arriving_counts, size, pieces)],
                overlaps=pieces > 1 or self.moe.shared_experts > 0,
            )
        )
        # (rank, piece, expert) -> (piece, rank, expert).
        by_piece = arriving.view(size, pieces, -1).transpose(0, 1).contiguous()
        sortings = _make_sortings(by_piece, [sum(runs) for runs in way.route.received])
        return depart(rows, way), Arriving(
            way=way,
            counts_on_host=[
                [sum(runs) for runs in zip(*ranks, strict=True)] for ranks in _regroup(arriving_counts, size, pieces)
            ],
            counts=by_piece.sum(1),
            sortings=sortings,
            keys=_send_keys(keys, way.route, sortings),
        )

    def compute(self, experts: Experts, tokens: tuple[Tensor, ...], arriving: Arriving) -> tuple[list[Tensor], Way]:
        """Compute the local experts, one piece after the other, and start each on its way back."""
        back, leaving = Way(arriving.way.route), []
        for piece, (token, stacks) in enumerate(zip(tokens, experts.stacks(len(tokens)), strict=True)):
            rows = arrive(token, arriving.way, piece, arriving.sortings[piece])
            by_expert: Counts = arriving.counts_on_host[piece]
            if isinstance(stacks[0].matrices, Tensor) and groups_on_device(rows, stacks[0].matrices):
                by_expert = arriving.counts[piece]
            leaving.append(
                turn(
                    experts.feed_forward(rows, by_expert, stacks, arriving.keys[piece]),
                    back,
                    piece,
                    arriving.sortings[piece],
                )
            )
        return leaving, back


def _send_keys(keys: Tensor | None, route: Route, sortings: list[Sorting]) -> list[Tensor | None]:
    """Send the keys of rows (N k,) the way of the rows, and sort those of each piece like its rows."""
    if keys is None:
        return [None] * len(sortings)
    leaving = keys.split([sum(runs) for runs in route.sent])
    return [
        _pick(route.group.all_to_all(part, sent, received), sorting.order)
        for part, sent, received, sorting in zip(leaving, route.sent, route.received, sortings, strict=True)
    ]


def _regroup(counts: list[int], ranks: int, pieces: int) -> list[list[list[int]]]:
    """Regroup counts of experts, by rank and then piece, to those of each piece, by rank."""
    number = len(counts) // ranks // pieces
    return [
        [counts[start : start + number] for start in range(piece * number, len(counts), pieces * number)]
        for piece in range(pieces)
    ]


def _make_sortings(counts: Tensor, sizes: list[int]) -> list[Sorting]:
    """Return the sorting of each piece, from counts (pieces, ep, X / ep / pieces) and the rows of each piece."""
    order, inverse = sort_runs(counts, sum(sizes))
    if order is None or inverse is None:
        return [Sorting(None, None)] * len(sizes)
    return list(map(Sorting, order.split(sizes), inverse.split(sizes)))


@takes("buffers")
def sort_runs(counts: Tensor, rows: int) -> tuple[Tensor | None, Tensor | None]:
    """Return (order, inverse) (rows,) each, for runs of rows that arrive by rank and then expert.

    `counts` (..., ep, X): rows of each run. sorted = arrived[order] is sorted by expert and then rank; arrived =
    sorted[inverse]. None = already sorted, with one expert. With pieces in front of ep, each is sorted by itself and
    numbered from its first row. No sort is needed: every row of a run moves as far as its run.
    """
    if counts.shape[-1] == 1:
        return None, None
    by_expert = counts.transpose(-1, -2).contiguous()
    # Where each run begins on arrival, and how far it moves to its place by expert.
    starts = _ends(counts) - counts
    first = starts[..., :1, :1]
    shift = (_ends(by_expert) - by_expert).transpose(-1, -2) - starts
    index = torch.arange(rows, device=counts.device)
    # Sums ran over all pieces; `first` makes each piece count from its own first row.
    forth, back = (shift - first).flatten(), (shift + first).transpose(-1, -2).flatten()
    order = index - back.repeat_interleave(by_expert.flatten(), output_size=rows)
    inverse = index + forth.repeat_interleave(counts.flatten(), output_size=rows)
    return order, inverse


class _MeanOver(torch.autograd.Function):
    """Mean over the ranks, without a collective in the backward pass.

    Each rank contributes the same loss divided by their number, so each already has the gradient that the ranks
    together would send it.
    """

    @staticmethod
    def forward(ctx: Any, means: Tensor, group: Group) -> Tensor:
        return group.all_reduce(means.clone()) / group.size

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


@torch.library.custom_op("meshwright::mean_over", mutates_args=())
def mean_over(x: Tensor, group: int) -> Tensor:
    """Compute `_MeanOver` as one operator of compiled code."""
    ranks = find_group(group)
    return ranks.all_reduce(x.clone(memory_format=torch.contiguous_format)) / ranks.size


@mean_over.register_fake
def _(x: Tensor, group: int) -> Tensor:
    return x.new_empty(x.shape)


mean_over.register_autograd(lambda ctx, gradient: (gradient, None))


def _mean_over(means: Tensor, group: Group) -> Tensor:
    if torch.compiler.is_compiling():
        traced: Tensor = mean_over(means, group.number)
        return traced
    mean: Tensor = _MeanOver.apply(means, group)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return mean


def _cut(experts: Experts, whole: int, group: Group) -> None:
    local = whole // group.size
    for module in experts.modules():
        for name, stack in list(module.named_parameters(recurse=False)):
            if len(stack) == whole:
                mine = stack.detach().narrow(0, group.index * local, local).clone()
                setattr(module, name, nn.Parameter(mine, requires_grad=stack.requires_grad))


def _ends(counts: Tensor) -> Tensor:
    return counts.flatten().cumsum(0).view_as(counts)
