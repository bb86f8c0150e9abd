"""The schedule that is executed, played with the planner's seconds; what data parallelism and the optimizer add."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from meshwright.planner.cost.links import Links
from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.stack import Stack
from meshwright.planner.time.collectives import Sharing
from meshwright.spec.layout import Layout
from meshwright.spec.places import own_stages
from meshwright.spec.replay import Timed, Turn, in_order, play
from meshwright.spec.schedule import last_of, schedule, stages_of_ranks
from meshwright.spec.schedule_kinds import KINDS, SPLIT, SPLIT_ALWAYS, V_PLACED

ROUNDS = 2
"""A long pipeline is played for so many times pp micro-batches; the rest repeats the steady state (within 1 % of all
played, where interleaved stages are uneven; exact for 1F1B)."""


class Edges(NamedTuple):
    """Shares of a rank's parameters: what is gathered before anything is computed and reduced when all is (0 = not
    known), and what ZeRO-3 gathers once a micro-batch, since it stays whole until the backward pass."""

    first: float = 0.0
    kept: float = 0.0


UNKNOWN = Edges()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, by what they are spent on; they add up to `total_s`."""

    compute_s: float
    """Busiest rank: forward and backward passes, what recomputation repeats included."""
    exchange_s: float
    """Exposed exchanges of tensor, context and expert parallelism inside them."""
    bubble_s: float
    """Waiting in the pipeline. Below 0 where ranks share cores: the others wait, and the busiest has their turns."""
    weights_s: float
    """Exposed gathers of ZeRO-3."""
    gradients_s: float
    """Exposed reductions of gradients, and gathers of updated parameters."""
    optimizer_s: float
    """Reading and writing states, weights and gradients."""
    other_s: float
    """Host work of a step and of its micro-batches."""
    offload_s: float = 0.0
    """Busiest rank: what the way of activations to host memory and back takes longer than computing."""
    muon_s: float = 0.0
    """Muon's products and what they are exchanged for: no FLOP of the model."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        parts = (self.compute_s, self.exchange_s, self.bubble_s, self.weights_s, self.gradients_s, self.optimizer_s)
        return sum(parts) + self.other_s + self.offload_s + self.muon_s


def short(name: str, ranks: int, micro_batches: int, virtual: int) -> int:
    """Micro-batches that are enough to play: equal rounds, long enough for a steady state."""
    most = ROUNDS * ranks
    if KINDS[name].holds_all or micro_batches <= most + ranks:
        return micro_batches
    return most + micro_batches % ranks if virtual == 1 else most


@cache
def _in_order(name: str, ranks: int, micro_batches: int, virtual: int) -> tuple[Turn, ...]:
    return in_order(schedule(name, ranks, micro_batches, virtual))


def pipeline_s(layout: Layout, micro_batches: int, stages: Sequence[Timed], send_s: float) -> float:
    """Seconds of all passes of a step."""
    few = short(layout.schedule, layout.pp, micro_batches, layout.vp)
    _, ends = play(_in_order(layout.schedule, layout.pp, few, layout.vp), stages, send_s)
    return max(ends) + (micro_batches - few) * max(busy_s(layout, stages))


def busy_s(layout: Layout, stages: Sequence[Timed]) -> tuple[float, ...]:
    """Of each pipeline rank for one micro-batch."""
    both = [_both(stage) for stage in stages]
    return tuple(sum([both[s] for s in own_stages(layout, rank)]) for rank in range(layout.pp))


def step_time(
    layout: Layout, stack: Stack, micro_batches: int, stages: list[MicroBatchCost], per_rank: Sequence[float],
    sharing: Sharing, update_s: float, muon_s: float, shared: float, passes_s: float, edges: Edges,
    ranks_per_core: float,
) -> StepTime:  # fmt: skip
    """Of a whole step. `per_rank`: busy_s. `sharing`: of all gradients once, of all parameters once (ZeRO).
    `shared`: so much of the exchanges inside the passes belongs to the backward pass and keeps the links that
    reductions need. `passes_s`: of all passes. `ranks_per_core` above 1: the seconds are those of ranks that take
    turns; while one waits the others have its turns, until the cores are busy all along."""
    m = micro_batches
    busiest = max(range(len(per_rank)), key=per_rank.__getitem__)
    own = [stages[s] for s in own_stages(layout, busiest)]
    exchange, offload = m * sum(cost.exchange_s for cost in own), m * sum(cost.offload_s for cost in own)
    busy = m * per_rank[busiest]
    bubble_s = passes_s - busy if layout.pp > 1 else 0.0
    if ranks_per_core > 1 and layout.pp > 1:
        bubble_s = max((busy + bubble_s) / ranks_per_core, m * sum(per_rank) / len(per_rank)) - busy
    behind = stack.hides_gradients * max(0.0, sum(cost.backward_s - shared * cost.exchange_s for cost in own))
    if stack.is_meshwright and layout.pp > 1:
        behind *= 1 - _after_passes(
            layout.schedule, layout.pp, short(layout.schedule, layout.pp, m, layout.vp), layout.vp
        )
    weights, gradients = _data_parallel(layout, stack, m, own, sharing, behind, edges)
    whole_s = _data_parallel_s(layout, m, sharing, edges)
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
    """No play of the schedule takes less: each rank waits for the forward passes of the stages in
    front of its first one, does all its work, and is followed by their backward passes. What a rank that splits
    backward passes has left to do by then, it does beside them. And one micro-batch passes all stages twice. Exact for
    equal stages but with DualPipe."""
    split, m = name in SPLIT, micro_batches
    ahead_s = behind_s = 0.0
    longest_s = sum([one.forward_s + one.input_s + (0.0 if split else one.weight_s) for one in stages])
    borders = 2 * (ranks - 1) if name in V_PLACED else ranks * virtual - 1  # the two ends of a V lie on one rank
    longest_s += 2 * borders * send_s
    for rank, own in enumerate(stages_of_ranks(name, ranks, virtual)):
        work_s = 0.0
        for stage in own:
            one = stages[stage]
            work_s += one.forward_s + one.input_s + one.weight_s
        left_s = _left_s(name, rank, m, [stages[stage].weight_s for stage in own]) if split else 0.0
        took_s = ahead_s + m * work_s + (behind_s - left_s if behind_s > left_s else 0.0)
        if took_s > longest_s:
            longest_s = took_s
        one = stages[rank]  # its first stage, whatever the placement
        ahead_s += one.forward_s + send_s
        behind_s += one.input_s + send_s + (0.0 if split else one.weight_s)
    return longest_s


def _left_s(name: str, rank: int, m: int, weights_s: list[float]) -> float:
    """Of gradients of weights, at most so much after a rank's last B of its first stage."""
    if name in V_PLACED and name in SPLIT_ALWAYS:
        return sum(min(m, rank + 1 - place) * took_s for place, took_s in enumerate(weights_s))
    return min(m * len(weights_s), rank + 1) * max(weights_s)


def _both(stage: Timed) -> float:
    return stage.forward_s + (stage.input_s + stage.weight_s)


@cache
def _after_passes(name: str, ranks: int, micro_batches: int, virtual: int) -> float:
    """Share of the first rank's stages whose gradients are whole only after gradients of weights that were left for
    later: their reductions begin then, behind nothing."""
    if name not in SPLIT:
        return 0.0
    last = last_of(schedule(name, ranks, micro_batches, virtual)[0], ("W", "BW"))
    return sum(action.kind == "W" for action in last.values()) / len(last)


def _data_parallel(
    layout: Layout, stack: Stack, m: int, own: list[MicroBatchCost], sharing: Sharing, behind: float, edges: Edges
) -> tuple[float, float]:
    """(exposed gathers, exposed reductions) of a step. Replicas are summed in its last micro-batch."""
    reduce_s, gather_s, copies_s = sharing
    final_s = reduce_s + copies_s
    forward = stack.hides_weights * sum(cost.forward_s for cost in own)
    if layout.zero == 3 and layout.pp == 1:
        backward = stack.hides_weights * sum(cost.backward_s for cost in own)
        share = edges.first or 1 / 50
        again_s = gather_s * (1 - edges.kept)
        weights = m * max(share * gather_s, gather_s - forward)
        weights += (m - 1) * max(0.0, again_s + reduce_s - backward) + max(0.0, again_s + final_s - backward)
        return weights, share * final_s
    share = (edges.first or 1 / 20) if stack.hides_gradients else 1.0
    times = m if layout.zero == 2 and layout.pp == 1 else 1
    gradients = (times - 1) * max(share * reduce_s, reduce_s - behind) + max(share * final_s, final_s - behind)
    weights = max(0.0, gather_s - forward) if layout.zero else 0.0
    return weights, gradients


class Unhidden(NamedTuple):
    """Seconds that data parallelism and the optimizer add to a step, below the truth whatever its passes are."""

    always_s: float
    """Behind passes that hide all they can."""
    alone_s: float
    """Behind no passes. Each second of a pass hides at most one of them."""
    hiding: float
    """Micro-batches whose passes hide some of it, less what that slows them."""

    def step_s(self, passes_s: float, m: int, turns: float) -> float:
        """Least seconds of a step whose `m` micro-batches pass in `passes_s` or longer. `turns`: ranks of a core."""
        left = max(0.0, 1 - turns * self.hiding / m)
        return max(passes_s + self.always_s, left * passes_s + self.alone_s)


UNLIMITED = [MicroBatchCost(forward_s=1e12, input_s=1e12)]
"""Passes that hide all that passes can hide."""


def unhidden(layout: Layout, stack: Stack, m: int, sharing: Sharing, update_s: float, edges: Edges) -> Unhidden:
    """Of `step_time`, what `sharing` and `update_s` add. A rank is busy for no longer than the passes take, so those of
    one micro-batch hide at most their m-th part."""
    always_s = sum(_data_parallel(layout, stack, m, UNLIMITED, sharing, UNLIMITED[0].backward_s, edges))
    alone_s = sum(_data_parallel(layout, stack, m, [], sharing, 0.0, edges))
    beside = stack.contention  # of what is hidden, as much is added to the passes
    also_s = beside * _data_parallel_s(layout, m, sharing, edges) + update_s
    hiding = m if layout.zero >= 2 and layout.pp == 1 else 1
    return Unhidden((1 - beside) * always_s + also_s, (1 - beside) * alone_s + also_s, (1 - beside) * hiding)


def _data_parallel_s(layout: Layout, m: int, sharing: Sharing, edges: Edges) -> float:
    """Of all gathers and reductions of a step, hidden ones too."""
    reduce_s, gather_s, copies_s = sharing
    if layout.zero == 3 and layout.pp == 1:
        return m * ((2 - edges.kept) * gather_s + reduce_s) + copies_s
    times = m if layout.zero == 2 and layout.pp == 1 else 1
    return times * reduce_s + copies_s + (gather_s if layout.zero else 0.0)


BACKWARD_EXCHANGES = 0.5
"""Of a pass's exchanges, those of the backward pass."""


def shared_links(layout: Layout, links: Links) -> float:
    """`shared` of step_time: reductions wait for exchanges where both take the same links."""
    ranks, stride = layout.dp * layout.cp, layout.tp
    inside, _ = links.span(ranks, stride)
    across = layout.tp > links.per_node
    return BACKWARD_EXCHANGES if ranks > 1 and (inside > 1 or across) else 0.0
