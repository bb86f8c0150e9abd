"""Expert parallelism (GShard, Lepikhin et al. 2020, arXiv:2006.16668), dropless: tokens go to their experts and back.

Rank r of `ep` holds experts r X/ep .. (r + 1) X/ep - 1, and every rank has its own tokens. A layer's forward pass:

    counts    (X,) rows for each expert, by all-to-all: every rank then knows how many rows arrive from whom
    there     rows, sorted by expert and so by rank, by all-to-all; on arrival sorted by local expert
    experts   as on one device, over the rows of all ranks
    back      put back in the order of arrival, and by all-to-all to where they came from

The backward pass goes both ways again (row_exchange.py). Rows travel in pieces, each for an equal part of every rank's
experts: one piece computes while the next is under way. Each expert sees all its rows at once, in the same order as in
one piece. The first half of the shared experts runs while rows come, the second while they return (moe.py).

Every rank calls the same collectives in the same order, however tokens are routed. A rank without rows takes part with
none, and its experts get gradients of zero.

An expert's gradient is the sum over the tokens of all ep ranks, so it must not be reduced over ep again. The ranks that
hold the same experts (`expert_shard`, `dp_replicate`) sum theirs.

In each of the four exchanges a rank sends its rows for other ranks, of D elements each. In the forward pass these are
about N k (ep - 1)/ep rows. The counts are 8 bytes for each expert of other ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels.experts.experts import Counts, groups_on_device
from meshwright.model.moe import Experts, ExpertStack, MoE
from meshwright.model.seams import Dispatch
from meshwright.parallel.axes import operators
from meshwright.parallel.axes.row_exchange import Route, Sorting, Way, arrive, depart, home, turn
from meshwright.parallel.groups.group import Group
from meshwright.spec.memory.purpose import takes
from meshwright.spec.model.shape import MoEShape


def whole(rows: int) -> int:
    """Return 1: rows travel in one piece, however many there are."""
    return 1


def apply_expert_parallel(model: nn.Module, group: Group, pieces: Callable[[int], int] = whole) -> None:
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

    `known` and `counts` (pieces, X/ep/pieces): rows for each local expert, on the host and on the device. `sortings`:
    how each piece is sorted.
    """

    way: Way
    known: list[list[int]]
    counts: Tensor
    sortings: list[Sorting]


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
            ordered=self.ordered, send=self.send, compute=self.compute, receive=lambda made: home(*made), travels=True
        )

    def ordered(self, choices: Tensor) -> Tensor:
        """Map experts (N k,) to their positions when sorted by piece, rank and expert."""
        pieces = self.pieces(len(choices))
        if pieces == 1:
            return choices
        places = torch.arange(self.moe.experts, device=choices.device).view(pieces, self.group.size, -1)
        return places.transpose(0, 1).flatten()[choices]

    def send(self, experts: Experts, rows: Tensor, counts: Tensor) -> tuple[tuple[Tensor, ...], Arriving]:
        """Send rows (N k, D) in that order. `counts` (X,): rows of each expert."""
        size, pieces = self.group.size, self.pieces(len(rows))
        runs = [len(counts) // size] * size
        # Counts go ahead of the rows: a rank must know how much it will receive.
        arriving = self.group.all_to_all(counts, runs, runs)
        # The host waits once, for the counts of both directions.
        leaving_known, arriving_known = experts.seams.counts_on_host(torch.stack((counts, arriving)), len(rows))
        way = Way(
            Route(
                group=self.group,
                sent=[[sum(run) for run in ranks] for ranks in _runs(leaving_known, size, pieces)],
                received=[[sum(run) for run in ranks] for ranks in _runs(arriving_known, size, pieces)],
                overlaps=pieces > 1 or self.moe.shared_experts > 0,
            )
        )
        # (rank, piece, expert) -> (piece, rank, expert).
        by_piece = arriving.view(size, pieces, -1).transpose(0, 1).contiguous()
        return depart(rows, way), Arriving(
            way=way,
            known=[[sum(each) for each in zip(*ranks, strict=True)] for ranks in _runs(arriving_known, size, pieces)],
            counts=by_piece.sum(1),
            sortings=_sortings(by_piece, [sum(runs) for runs in way.route.received]),
        )

    def compute(self, experts: Experts, tokens: tuple[Tensor, ...], arriving: Arriving) -> tuple[list[Tensor], Way]:
        """Compute the local experts, one piece after the other, and start each on its way back."""
        back = Way(arriving.way.route)
        parts = enumerate(zip(tokens, experts.stacks(len(tokens)), strict=True))
        return [_visit(experts, stacks, token, piece, arriving, back) for piece, (token, stacks) in parts], back


def _visit(
    experts: Experts, stacks: tuple[ExpertStack, ...], token: Tensor, piece: int, arriving: Arriving, back: Way
) -> Tensor:
    here = arrive(token, arriving.way, piece, arriving.sortings[piece])
    by_expert: Counts = arriving.known[piece]
    if isinstance(stacks[0].matrices, Tensor) and groups_on_device(here, stacks[0].matrices):
        by_expert = arriving.counts[piece]
    return turn(experts.feed_forward(here, by_expert, stacks), back, piece, arriving.sortings[piece])


def _runs(counts: list[int], ranks: int, pieces: int) -> list[list[list[int]]]:
    """Regroup counts of experts, by rank and then piece, to those of each piece, by rank."""
    number = len(counts) // ranks // pieces
    return [
        [counts[start : start + number] for start in range(piece * number, len(counts), pieces * number)]
        for piece in range(pieces)
    ]


def _sortings(counts: Tensor, sizes: list[int]) -> list[Sorting]:
    """Return the sorting of each piece, from counts (pieces, ep, X / ep / pieces) and the rows of each piece."""
    order, inverse = sort_runs(counts, sum(sizes))
    if order is None or inverse is None:
        return [Sorting(None, None)] * len(sizes)
    return [Sorting(*both) for both in zip(order.split(sizes), inverse.split(sizes), strict=True)]


@takes("buffers")
def sort_runs(counts: Tensor, rows: int) -> tuple[Tensor | None, Tensor | None]:
    """Return (order, inverse) (rows,) each, for runs of rows that arrive by rank and then expert.

    `counts` (..., ep, X): rows of each run. sorted = arrived[order] is sorted by expert and then rank; arrived =
    sorted[inverse]. None = already sorted, with one expert. With pieces in front of ep, each is sorted by itself and
    numbered from its first row. No sort is needed: every row of a run moves as far as its run.
    """
    if counts.shape[-1] == 1:
        return None, None
    turned = counts.transpose(-1, -2).contiguous()
    # Where each run begins on arrival, and how far it moves to its place by expert.
    starts = _ends(counts) - counts
    first = starts[..., :1, :1]
    shift = (_ends(turned) - turned).transpose(-1, -2) - starts
    index = torch.arange(rows, device=counts.device)
    # Sums ran over all pieces; `first` makes each piece count from its own first row.
    back, there = (shift + first).transpose(-1, -2).flatten(), (shift - first).flatten()
    order = index - back.repeat_interleave(turned.flatten(), output_size=rows)
    inverse = index + there.repeat_interleave(counts.flatten(), output_size=rows)
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


def _mean_over(means: Tensor, group: Group) -> Tensor:
    if torch.compiler.is_compiling():
        traced: Tensor = operators.mean_over(means, group.number)
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
