"""Timeline of a step: the schedule played with the planner's seconds, data parallelism and the optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from meshwright.planner.cost.exchanges import Links
from meshwright.planner.cost.micro_batch import MicroBatchCost
from meshwright.planner.cost.stack import Stack
from meshwright.planner.time.collectives import Sharing
from meshwright.spec.layout.layout import Layout, own_stages
from meshwright.spec.layout.replay import Timed, Turn, order_turns, play
from meshwright.spec.layout.schedule import KINDS, SPLIT, SPLIT_ALWAYS, V_PLACED, last_of, schedule, stages_of_ranks

ROUNDS = 2
"""Rounds of pp micro-batches for which a long pipeline is played. The rest repeats the steady state.

Exact for 1F1B, within 1 % of playing everything where interleaved stages are uneven.
"""


class Edges(NamedTuple):
    """Shares of a rank's parameters.

    `first`: gathered before any computation and reduced after all of it. 0 = unknown. `stays_whole`: gathered by ZeRO-3
    once per micro-batch, since it stays whole until the backward pass.
    """

    first: float = 0.0
    stays_whole: float = 0.0


UNKNOWN = Edges()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step by what they are spent on. They add up to `total_s`."""

    compute_s: float
    """Busiest rank: forward and backward passes, recomputation included."""
    exchange_s: float
    """Exposed exchanges of tensor, context and expert parallelism in these passes."""
    bubble_s: float
    """Waiting in the pipeline. Negative if ranks share cores: while others wait, the busiest uses their turns."""
    weights_s: float
    """Exposed gathers of ZeRO-3."""
    gradients_s: float
    """Exposed reductions of gradients, and gathers of updated parameters."""
    optimizer_s: float
    """Reading and writing states, weights and gradients."""
    other_s: float
    """Host work of a step and of its micro-batches."""
    offload_s: float = 0.0
    """Busiest rank: time by which offloading to host memory and back exceeds computation."""
    muon_s: float = 0.0
    """Muon's products and their exchanges, which are no FLOP of the model."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        parts = (self.compute_s, self.exchange_s, self.bubble_s, self.weights_s, self.gradients_s, self.optimizer_s)
        return sum(parts) + self.other_s + self.offload_s + self.muon_s


def short(name: str, ranks: int, micro_batches: int, virtual: int) -> int:
    """Return the micro-batches that suffice to play: equal rounds, long enough for a steady state."""
    most = ROUNDS * ranks
    if KINDS[name].holds_all or micro_batches <= most + ranks:
        return micro_batches
    return most + micro_batches % ranks if virtual == 1 else most


@cache
def _in_order(name: str, ranks: int, micro_batches: int, virtual: int) -> tuple[Turn, ...]:
    return order_turns(schedule(name, ranks, micro_batches, virtual))


def pipeline_s(layout: Layout, micro_batches: int, stages: Sequence[Timed], send_s: float) -> float:
    """Return the seconds of all passes of a step."""
    # From the steady state on, each further micro-batch adds the work of the busiest rank.
    few = short(layout.schedule, layout.pp, micro_batches, layout.vp)
    _, ends = play(_in_order(layout.schedule, layout.pp, few, layout.vp), stages, send_s)
    return max(ends) + (micro_batches - few) * max(busy_s(layout, stages))


def busy_s(layout: Layout, stages: Sequence[Timed]) -> tuple[float, ...]:
    """Return the seconds of each pipeline rank for one micro-batch."""
    both = [_both(stage) for stage in stages]
    return tuple(sum([both[s] for s in own_stages(layout, rank)]) for rank in range(layout.pp))


def step_time(
    layout: Layout, stack: Stack, micro_batches: int, stages: list[MicroBatchCost], per_rank: Sequence[float],
    sharing: Sharing, update_s: float, muon_s: float, shared: float, passes_s: float, edges: Edges,
    ranks_per_core: float,
) -> StepTime:  # fmt: skip
    """Return the time of a whole step.

    Args:
        per_rank: busy_s.
        sharing: Seconds of all gradients once and of all parameters once (ZeRO).
        shared: Share of the exchanges that belongs to the backward pass and occupies the links that reductions need.
        passes_s: Seconds of all passes.
        ranks_per_core: Above 1, ranks take turns. While one waits the others use its turns, until the cores are busy.
    """
    m = micro_batches
    # The busiest rank sets the pace; what it waits for is the bubble.
    busiest = max(range(len(per_rank)), key=per_rank.__getitem__)
    costs = [stages[s] for s in own_stages(layout, busiest)]
    exchange, offload = m * sum(cost.exchange_s for cost in costs), m * sum(cost.offload_s for cost in costs)
    busy = m * per_rank[busiest]
    bubble_s = passes_s - busy if layout.pp > 1 else 0.0
    # A waiting rank gives its core to others, so sharing cores costs less than its full factor.
    if ranks_per_core > 1 and layout.pp > 1:
        bubble_s = max((busy + bubble_s) / ranks_per_core, m * sum(per_rank) / len(per_rank)) - busy
    # Reductions hide behind backward computation that leaves the same links free.
    behind = stack.hides_gradients * max(0.0, sum(cost.backward_s - shared * cost.exchange_s for cost in costs))
    if stack.is_meshwright and layout.pp > 1:
        # Gradients of a pipeline are complete only with its last micro-batch: few passes are left then.
        behind *= 1 - _after_passes(
            layout.schedule, layout.pp, short(layout.schedule, layout.pp, m, layout.vp), layout.vp
        )
    weights, gradients = _data_parallel(layout, stack, m, costs, sharing, behind, edges)
    whole_s = _data_parallel_s(layout, m, sharing, edges)
    # What is hidden is not free: kernels that run meanwhile are slower.
    slowed = stack.contention * max(0.0, whole_s - weights - gradients)
    return StepTime(
        compute_s=busy - exchange - offload + slowed,
        offload_s=offload,
        exchange_s=exchange,
        bubble_s=bubble_s,
        weights_s=weights,
        gradients_s=gradients,
        optimizer_s=update_s,
        muon_s=muon_s,
        other_s=stack.step_s + m * stack.micro_batch_s,
    )


def least_s(name: str, ranks: int, virtual: int, micro_batches: int, stages: Sequence[Timed], send_s: float) -> float:
    """Return a lower bound of the seconds of any play of the schedule. Exact for equal stages except with DualPipe.

    Each rank waits for the forward passes of the stages before its first one, does all its work, and is followed by
    their backward passes. Work that a split backward pass has left by then overlaps with them. Also, one micro-batch
    passes all stages twice.
    """
    split, m = name in SPLIT, micro_batches
    ahead_s = behind_s = 0.0
    # One micro-batch through all stages and back.
    longest_s = sum([cost.forward_s + cost.input_s + (0.0 if split else cost.weight_s) for cost in stages])
    borders = 2 * (ranks - 1) if name in V_PLACED else ranks * virtual - 1  # both ends of a V lie on one rank
    longest_s += 2 * borders * send_s
    for rank, rank_stages in enumerate(stages_of_ranks(name, ranks, virtual)):
        work_s = 0.0
        for stage in rank_stages:
            cost = stages[stage]
            work_s += cost.forward_s + cost.input_s + cost.weight_s
        left_s = _queued_weights_s(name, rank, m, [stages[stage].weight_s for stage in rank_stages]) if split else 0.0
        took_s = ahead_s + m * work_s + (behind_s - left_s if behind_s > left_s else 0.0)
        if took_s > longest_s:
            longest_s = took_s
        cost = stages[rank]  # its first stage, whatever the placement
        ahead_s += cost.forward_s + send_s
        behind_s += cost.input_s + send_s + (0.0 if split else cost.weight_s)
    return longest_s


def _queued_weights_s(name: str, rank: int, m: int, weights_s: list[float]) -> float:
    """Return the most seconds of weight gradients left after a rank's last B of its first stage."""
    if name in V_PLACED and name in SPLIT_ALWAYS:
        return sum(min(m, rank + 1 - index) * took_s for index, took_s in enumerate(weights_s))
    return min(m * len(weights_s), rank + 1) * max(weights_s)


def _both(stage: Timed) -> float:
    return stage.forward_s + (stage.input_s + stage.weight_s)


@cache
def _after_passes(name: str, ranks: int, micro_batches: int, virtual: int) -> float:
    """Return the share of the first rank's stages whose gradients are complete only after deferred weight gradients.

    Their reductions begin then, hidden by nothing.
    """
    if name not in SPLIT:
        return 0.0
    last = last_of(schedule(name, ranks, micro_batches, virtual)[0], ("W", "BW"))
    return sum(action.kind == "W" for action in last.values()) / len(last)


def _data_parallel(
    layout: Layout, stack: Stack, m: int, costs: list[MicroBatchCost], sharing: Sharing, behind: float, edges: Edges
) -> tuple[float, float]:
    """Return (exposed gathers, exposed reductions) of a step. Replicas are summed in its last micro-batch."""
    reduce_s, gather_s, copies_s = sharing
    if stack.is_meshwright and layout.overlap == "off":
        gathered_s = _gathers_s(layout, m, sharing, edges)
        return gathered_s, _data_parallel_s(layout, m, sharing, edges) - gathered_s
    final_s = reduce_s + copies_s
    forward = stack.hides_weights * sum(cost.forward_s for cost in costs)
    # Each micro-batch gathers twice; the first gather and the last reduction have nothing to hide behind.
    if layout.zero == 3 and layout.pp == 1:
        backward = stack.hides_weights * sum(cost.backward_s for cost in costs)
        share = edges.first or 1 / 50
        # The backward pass gathers everything again but the unit that stayed whole.
        again_s = gather_s * (1 - edges.stays_whole)
        weights = m * max(share * gather_s, gather_s - forward)
        weights += (m - 1) * max(0.0, again_s + reduce_s - backward) + max(0.0, again_s + final_s - backward)
        return weights, share * final_s
    # The first unit's gradients are ready last, so their reduction is always exposed.
    share = (edges.first or 1 / 20) if stack.hides_gradients else 1.0
    times = m if layout.zero == 2 and layout.pp == 1 else 1
    gradients = (times - 1) * max(share * reduce_s, reduce_s - behind) + max(share * final_s, final_s - behind)
    weights = max(0.0, gather_s - forward) if layout.zero else 0.0
    return weights, gradients


class Unhidden(NamedTuple):
    """Lower bound of the seconds that data parallelism and the optimizer add to a step, whatever its passes are."""

    always_s: float
    """Behind passes that hide all they can."""
    alone_s: float
    """Behind no passes. Each second of a pass hides at most one of these."""
    hiding: float
    """Micro-batches whose passes hide some of it, less the slowdown that this causes."""

    def step_s(self, passes_s: float, m: int, turns: float) -> float:
        """Return the least seconds of a step whose `m` micro-batches take at least `passes_s`.

        `turns`: ranks per core.
        """
        left = max(0.0, 1 - turns * self.hiding / m)
        return max(passes_s + self.always_s, left * passes_s + self.alone_s)


UNLIMITED = [MicroBatchCost(forward_s=1e12, input_s=1e12)]
"""Passes that hide everything that passes can hide."""


def unhidden(layout: Layout, stack: Stack, m: int, sharing: Sharing, update_s: float, edges: Edges) -> Unhidden:
    """Return what `sharing` and `update_s` add to `step_time`.

    A rank is busy for at most the duration of the passes, so those of one micro-batch hide at most an m-th of it.
    """
    # Two extremes: passes that hide all they can, and no passes at all.
    always_s = sum(_data_parallel(layout, stack, m, UNLIMITED, sharing, UNLIMITED[0].backward_s, edges))
    alone_s = sum(_data_parallel(layout, stack, m, [], sharing, 0.0, edges))
    beside = stack.contention  # hidden communication slows the passes by this share
    also_s = beside * _data_parallel_s(layout, m, sharing, edges) + update_s
    hiding = m if layout.zero >= 2 and layout.pp == 1 else 1
    # A hidden second still slows the passes by `beside`, so hiding it saves less than a second.
    return Unhidden((1 - beside) * always_s + also_s, (1 - beside) * alone_s + also_s, (1 - beside) * hiding)


def _data_parallel_s(layout: Layout, m: int, sharing: Sharing, edges: Edges) -> float:
    """Return the seconds of all gathers and reductions of a step, hidden ones included."""
    times = m if layout.zero >= 2 and layout.pp == 1 else 1
    return times * sharing.reduce_s + sharing.copies_s + _gathers_s(layout, m, sharing, edges)


def _gathers_s(layout: Layout, m: int, sharing: Sharing, edges: Edges) -> float:
    """Return the seconds of all gathers of parameters in a step, hidden ones included."""
    if layout.zero == 3 and layout.pp == 1:
        return m * (2 - edges.stays_whole) * sharing.gather_s
    return sharing.gather_s if layout.zero else 0.0


BACKWARD_EXCHANGES = 0.5
"""Share of a pass's exchanges in the backward pass."""


def shared_links(layout: Layout, links: Links) -> float:
    """Return `shared` of step_time: reductions wait for exchanges if both use the same links."""
    ranks, stride = layout.dp * layout.cp, layout.tp
    inside, _ = links.span(ranks, stride)
    # Tensor parallelism beyond a node uses the network, as reductions do.
    across = layout.tp > links.per_node
    return BACKWARD_EXCHANGES if ranks > 1 and (inside > 1 or across) else 0.0
