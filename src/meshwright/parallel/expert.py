"""Expert parallelism (GShard, Lepikhin et al. 2020, arXiv:2006.16668), dropless: tokens go to their experts and back.

Rank r of `ep` holds experts r X/ep .. (r + 1) X/ep - 1, and every rank has tokens of its own. A layer's forward pass:

    counts    (X,) rows for each expert, by all-to-all: every rank then knows what arrives from whom
    there     rows, sorted by expert and so by rank, by all-to-all; on arrival sorted by local expert
    experts   as on one device, over the rows of all ranks
    back      put back in the order of arrival, and by all-to-all to where they came from

and the backward pass goes both ways again. Every rank calls the same collectives in the same order, however tokens are
routed: a rank that sends or receives nothing takes part with nothing, and its experts get gradients of zero.

An expert's gradient is the sum over the tokens of all ep ranks; it must not be reduced over ep again. The ranks that
hold the same experts (`expert_shard`, `dp_replicate`) sum theirs.

Sent by a rank in each of the four journeys: its rows for other ranks x D x element size, about N k (ep - 1)/ep rows
there in the forward pass; the counts are 8 bytes an expert of other ranks.
"""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels.experts import Counts, groups_on_device
from meshwright.model.moe import Experts, MoE
from meshwright.parallel import operators
from meshwright.parallel.group import Group
from meshwright.spec.purpose import takes


def apply_expert_parallel(model: nn.Module, group: Group) -> None:
    """Make every mixture of experts in `model` (or `model` itself) one over the ranks of `group`.

    Stacks of all X experts are cut to this rank's (values kept); stacks of X/ep are taken as this rank's already.
    Every rank must then run the same passes, evaluation too. The dispatch reads lengths of runs: like the experts of
    one device it is for torch.compiler.disable, not for the compiler.
    """
    if group.size == 1:
        return
    for module in model.modules():
        if isinstance(module, MoE):
            _cut(module.experts, module.moe.experts, group)
            module.seams.dispatch = Dispatch(group).run


def apply_sequence_groups(model: nn.Module, *groups: Group) -> None:
    """Let the balance loss see whole sequences, where the ranks of `groups` (cp; tp with sp) hold equal parts of them.

    The loss of each sequence (B,) is then the same on each rank and equals one device's. As always a rank adds its part
    to the step's loss: the balance loss divided by the product of the groups' sizes. Gradients, summed over the ranks,
    then equal one device's.
    """
    present = [group for group in groups if group.size > 1]
    for module in model.modules():
        if isinstance(module, MoE) and present:
            module.seams.over_sequence = partial(reduce, _mean_over, present)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What stands in place of Experts.compute where experts lie on other ranks."""

    group: Group

    def run(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """This rank's rows (N k, D) sorted by expert, counts (X,) rows of each of all experts -> (N k, D)."""
        local = len(counts) // self.group.size
        runs = [local] * self.group.size
        arriving = self.group.all_to_all(counts, runs, runs)
        leaving_known, arriving_known = experts.seams.counts_on_host(torch.stack((counts, arriving)), len(rows))
        route = Route(group=self.group, sent=_sums(leaving_known, local), received=_sums(arriving_known, local))
        order, inverse = sort_runs(arriving.view(-1, local), sum(route.received))
        here = _travel(rows, order, inverse, route, True)
        by_expert: Counts = [sum(arriving_known[expert::local]) for expert in range(local)]
        if groups_on_device(here, experts.up):
            by_expert = arriving.view(-1, local).sum(0)
        return _travel(experts.feed_forward(here, by_expert), order, inverse, route, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How many rows this rank sends to each rank of the group, and how many each one sends here."""

    group: Group
    sent: list[int]
    received: list[int]

    def there(self, rows: Tensor, order: Tensor | None) -> Tensor:
        """Rows (N k, D) sorted by rank -> the rows (R, D) that arrive here, put in `order`."""
        return _pick(self.group.all_to_all(rows, self.sent, self.received), order)

    def back(self, rows: Tensor, inverse: Tensor | None) -> Tensor:
        """Rows (R, D) in order -> rows (N k, D) as they were sent."""
        return self.group.all_to_all(_pick(rows, inverse), self.received, self.sent)


class _Travel(torch.autograd.Function):
    """One journey; its gradient makes the opposite one. The order is saved, so that recomputation may drop it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, order: Tensor | None, inverse: Tensor | None, route: Route, outward: bool
    ) -> Tensor:
        ctx.route, ctx.outward = route, outward
        ctx.save_for_backward(inverse if outward else order)
        return route.there(rows, order) if outward else route.back(rows, inverse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        found = ctx.route.back(gradient, order) if ctx.outward else ctx.route.there(gradient, order)
        return found, None, None, None, None


def _travel(rows: Tensor, order: Tensor | None, inverse: Tensor | None, route: Route, outward: bool) -> Tensor:
    found: Tensor = _Travel.apply(rows, order, inverse, route, outward)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return found


@takes("buffers")
def sort_runs(counts: Tensor, rows: int) -> tuple[Tensor | None, Tensor | None]:
    """counts (ep, X/ep): runs of rows as they arrive, by rank and then expert -> (order, inverse) (rows,) each.

    sorted = arrived[order] lies by expert and then rank; arrived = sorted[inverse]. None: already sorted, where there
    is one expert only. Without sorting: every row of a run moves by as much as its run.
    """
    if counts.shape[1] == 1:
        return None, None
    turned = counts.t().contiguous()
    starts = _ends(counts) - counts
    shift = (_ends(turned) - turned).t() - starts
    place = torch.arange(rows, device=counts.device)
    order = place - shift.t().flatten().repeat_interleave(turned.flatten(), output_size=rows)
    inverse = place + shift.flatten().repeat_interleave(counts.flatten(), output_size=rows)
    return order, inverse


class _MeanOver(torch.autograd.Function):
    """The mean over the ranks. Each contributes the same loss divided by their number, so that each already has the
    gradient that the ranks together would send it: the backward pass needs no collective."""

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
    found: Tensor = _MeanOver.apply(means, group)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return found


def _cut(experts: Experts, whole: int, group: Group) -> None:
    local = whole // group.size
    for name, stack in list(experts.named_parameters(recurse=False)):
        if len(stack) == whole:
            mine = stack.detach().narrow(0, group.index * local, local).clone()
            setattr(experts, name, nn.Parameter(mine, requires_grad=stack.requires_grad))


def _sums(counts: list[int], run: int) -> list[int]:
    return [sum(counts[start : start + run]) for start in range(0, len(counts), run)]


def _ends(counts: Tensor) -> Tensor:
    return counts.flatten().cumsum(0).view_as(counts)


@takes("buffers")
def _pick(rows: Tensor, order: Tensor | None) -> Tensor:
    return rows if order is None else rows.index_select(0, order)
