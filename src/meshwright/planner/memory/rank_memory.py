"""Peak memory of a pipeline rank: what it always holds, and the worst moment of its schedule."""

from dataclasses import dataclass
from operator import add

from meshwright.planner.cost.micro_batch import MicroBatchCost
from meshwright.planner.cost.stack import Stack
from meshwright.planner.cost.states import States
from meshwright.planner.memory.engine_peak import GatherUnits, Instant, MomentBytes, PipelineRank, What, moments
from meshwright.spec.layout.layout import Layout, own_stages
from meshwright.spec.layout.schedule import KINDS, SPLIT_ALWAYS, V_PLACED, Rounds
from meshwright.spec.memory.held import PLANNED

DRIVER_BYTES = 1.7e9
"""Bytes of a device's nominal memory that firmware, context and communication library take.

An A100 or H100 of 80 GiB shows 79.1 GiB, a CUDA context takes 0.5 GiB, NCCL's channels at least 0.3 GiB (torch 2.11,
NCCL 2.2x).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes by kind at the worst moment of one pipeline rank."""

    pp_rank: int
    when: str
    kinds: dict[str, float]
    host_bytes: float = 0.0
    """Most bytes in host memory."""

    @property
    def total_bytes(self) -> float:
        """The peak."""
        return sum(self.kinds.values())


def in_flight(layout: Layout, micro_batches: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return micro-batches alive in each stage of a rank at moments that include every fullest one.

    A micro-batch is alive until its weight gradients are computed.
    """
    instants = moments(layout, micro_batches, rank)
    return tuple({tuple(map(add, instant.alive, instant.queued)) for instant in instants})


def leading(name: str, ranks: int, micro_batches: int, virtual: int, rank: int) -> tuple[int, ...]:
    """Return micro-batches alive in each stage of a rank when its first backward pass begins, by closed form.

    It is a moment of the schedule, so no peak is below it. Usually it is the fullest.
    """
    p, v, m = ranks, virtual, micro_batches
    if p == 1:
        return (1,)
    if name in V_PLACED:
        return min(m, 2 * p - rank - 1), min(m, rank + 1)
    if KINDS[name].holds_all:
        return (m,)
    # Rounds share all micro-batches evenly, so one may be wider than the pipeline.
    width, order = m // max(1, m // p), KINDS[name].order
    hop = order.hop if isinstance(order, Rounds) else 1
    ahead = min((v - 1) * width + hop * (p - 1 - rank) + 1, v * m)
    rounds, rest = divmod(ahead, v * width)
    return tuple(rounds * width + min(width, max(0, rest - chunk * width)) for chunk in range(v))


def returns(name: str, ranks: int, micro_batches: int, virtual: int) -> bool:
    """Return True if all gradients exist when as much is in flight as before a rank's first backward pass.

    Unknown, hence False, for schedules laid out in a V.
    """
    p, v, m = ranks, virtual, micro_batches
    if p == 1:
        return m > 1
    order = KINDS[name].order
    if not isinstance(order, Rounds):
        return False
    if order.hop == 1:
        return m > (3 * p if order.late else p)
    # Interleaved schedules go round in groups of about p micro-batches per chunk.
    width = m // max(1, m // p)
    ahead = sum(leading(name, p, m, v, 0))
    return m * v > ahead + v * width


def first_backward(layout: Layout, micro_batches: int, rank: int) -> Instant:
    """Return the moment at which a backward pass begins with as much in flight as before the first, by closed form."""
    name, p, v = layout.schedule, layout.pp, layout.vp
    alive = leading(name, p, micro_batches, v, rank)
    graded = (int(returns(name, p, micro_batches, v)),) * len(alive)
    what: What = "inputs" if name in V_PLACED or name in SPLIT_ALWAYS else "sums" if micro_batches == 1 else "pass"
    none = (0,) * len(alive)
    return Instant(what, len(alive) - 1, alive, none, graded, none)


def rank_memory(
    layout: Layout, stack: Stack, micro_batches: int, stages: list[MicroBatchCost], state: States, rank: int,
    gathered_bytes: float, border_bytes: float, update_bytes: float, exact: bool = True,
    units: GatherUnits | None = None, fullest: tuple[MomentBytes, ...] = (), logits_bytes: float = 0.0,
    sums_products: bool = False,
) -> RankMemory:  # fmt: skip
    """Return the peak of a pipeline rank.

    Args:
        gathered_bytes: Of other software, what data parallelism gathers and reduces from.
        border_bytes: A stage's output.
        exact: Play the schedule. Otherwise in-flight counts come from a closed form, which never exceeds the peak.
        units: Of Meshwright's engine, with its `fullest` moments.
        logits_bytes: The last stage's output, in 16 bit.
        sums_products: As in PipelineRank.
    """
    rank_stages = own_stages(layout, rank)
    costs, first, last = (
        [stages[stage] for stage in rank_stages],
        rank_stages[0] == 0,
        rank_stages[-1] == len(stages) - 1,
    )
    # The engine's moments are known one by one; of other software only what is in flight.
    alive: tuple[tuple[int, ...], ...] = ((),)
    if units is not None:
        engine = PipelineRank(
            layout=layout, costs=costs, state=state.step, units=units, computed_gradient_bytes=state.parameter_bytes,
            kept_gradient_bytes=state.gradient_bytes, sums_products=sums_products, last=last, first=first,
        )  # fmt: skip
        when, kinds = engine.peak(fullest)
    else:
        when = "backward pass"
        alive = (leading(layout.schedule, layout.pp, micro_batches, layout.vp, rank),)
        if exact:
            alive = in_flight(layout, micro_batches, rank)
        activations = max(_sum(moment, [cost.kept_bytes for cost in costs]) for moment in alive)
        kinds = {**state.step, "activations": activations, **_backward(alive, costs, gathered_bytes)}
    # Meshwright receives into what a stage keeps as its input, which a dry run counts as activations.
    kinds["buffers" if units is None else "activations"] += _borders(layout, stack, alive, border_bytes)
    # Every border but the model's two ends has a buffer per micro-batch.
    if stack.step_buffers and layout.pp > 1:
        kinds["buffers"] += (2 * len(rank_stages) - first - last) * micro_batches * border_bytes
        kinds["logits"] += micro_batches * logits_bytes if last else 0.0
    update, then = {**state.update, "temporaries": update_bytes}, "optimizer step"
    if layout.cuda_graphs == "on":  # the graphs' pool retains the peak of a pass
        update["buffers"] = sum(kinds.values()) - sum(state.step.values())
        head_bytes = max(cost.logits.chunk for cost in costs)
        if head_bytes > update_bytes:
            update["temporaries"], then = head_bytes, "evaluation"
    # Passes and update never overlap: the larger is the peak.
    if sum(update.values()) > sum(kinds.values()):
        kinds, when = update, then
    # Only activations come and go, so only they leave gaps in the memory of the allocator.
    slack = (stack.slack - 1) * kinds.get("activations", 0.0)
    kinds["reserve"] = stack.reserve_bytes + slack
    host = [cost.host_bytes for cost in costs]
    moved = max(_sum(alive, host) for alive in in_flight(layout, micro_batches, rank)) if any(host) else 0.0
    kinds = {kind: kinds.get(kind, 0.0) for kind in PLANNED}
    return RankMemory(pp_rank=rank, when=when, kinds=kinds, host_bytes=moved)


def _sum(counts: tuple[int, ...], sizes: list[float]) -> float:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _backward(alive: tuple[tuple[int, ...], ...], costs: list[MicroBatchCost], gathered: float) -> dict[str, float]:
    """Return the worse of two moments: inside head and loss, or inside the layer behind.

    In the latter one micro-batch's logits are already freed.
    """
    kept_bytes = max(_sum(moment, [cost.logits.kept_bytes for cost in costs]) for moment in alive)
    freed_bytes = max(cost.logits.kept_bytes - cost.logits.held_bytes for cost in costs)
    inside = max(cost.transient_bytes for cost in costs)
    head = {
        "logits": kept_bytes + max(cost.logits.transient for cost in costs),
        "temporaries": 0.0,
        "buffers": gathered,
    }
    layer = {"logits": kept_bytes - freed_bytes, "temporaries": inside, "buffers": gathered}
    return max(head, layer, key=lambda kinds: sum(kinds.values()))


def _borders(layout: Layout, stack: Stack, alive: tuple[tuple[int, ...], ...], border_bytes: float) -> float:
    """Return what a pipeline has received and has yet to send."""
    if layout.pp == 1:
        return 0.0
    return 2 * border_bytes + (border_bytes * max(map(sum, alive)) if stack.outputs_kept else 0.0)
