"""Peak memory of a pipeline rank: what it always holds, and the worst moment of the schedule it runs."""

from dataclasses import dataclass
from functools import cache

from meshwright.planner.stack import Stack
from meshwright.planner.stages import Cost
from meshwright.planner.states import States
from meshwright.planner.timeline import actions_of
from meshwright.spec.layout import Layout
from meshwright.spec.places import own_stages

ENOUGH = 3
"""Micro-batches in flight do not grow beyond so many rounds of the pipeline (all but AFAB)."""
KINDS = ("parameters", "shards", "gradients", "masters", "moments", "counters", "activations", "logits", "buffers",
         "temporaries", "reserve")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes by kind at the worst moment of one pipeline rank."""

    pp_rank: int
    when: str
    kinds: dict[str, float]

    @property
    def total_bytes(self) -> float:
        """The peak."""
        return sum(self.kinds.values())


@cache
def in_flight(name: str, ranks: int, micro_batches: int, virtual: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """The moments of a rank worth looking at: micro-batches alive in each of its stages, none below another."""
    if ranks == 1:
        return ((1,),)
    actions = actions_of(name, ranks, micro_batches, virtual)[rank]
    places = {stage: index for index, stage in enumerate(sorted({action.stage for action in actions}))}
    alive = [0] * len(places)
    found: set[tuple[int, ...]] = set()
    for action in actions:
        if action.kind == "F":
            alive[places[action.stage]] += 1
            found.add(tuple(alive))
        elif action.kind in ("W", "BW"):
            alive[places[action.stage]] -= 1
    return tuple(a for a in found if not any(b != a and all(x <= y for x, y in zip(a, b, strict=True)) for b in found))


def moments(layout: Layout, stack: Stack, micro_batches: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """`in_flight` for a step of so many micro-batches."""
    if stack.pipeline_kept == "all" and layout.pp > 1:
        return ((micro_batches,) * layout.vp,)
    few = micro_batches
    if layout.schedule != "afab" and micro_batches > ENOUGH * layout.pp + layout.pp:
        few = ENOUGH * layout.pp + (micro_batches % layout.pp if layout.vp == 1 else 0)
    return in_flight(layout.schedule, layout.pp, few, layout.vp, rank)


def about(schedule: str, ranks: int, virtual: int, micro_batches: int, rank: int) -> float:
    """Micro-batches of a whole rank in flight by closed form, for a search; each of its stages has as many.

    Sources: Narayanan et al. 2021 (1F1B, interleaved), Qi et al. 2023 and 2024 (zero-bubble), DeepSeek-V3 (DualPipe).
    """
    p, v, m = ranks, virtual, micro_batches
    alive = {
        "afab": m,
        "1f1b": p - rank,
        "interleaved": (2 * (p - rank - 1) + (v - 1) * p + 1) / v,
        "zb-h1": p,
        "zb-v": p,
        "dualpipe-v": p + 1,
    }[schedule]
    return float(min(m, alive)) if p > 1 else 1.0


def rank_memory(
    layout: Layout, stack: Stack, micro_batches: int, stages: list[Cost], state: States, rank: int,
    unit_bytes: float, unit_gradient_bytes: float, border_bytes: float, update_bytes: float, exact: bool = True,
) -> RankMemory:  # fmt: skip
    """`unit_bytes`: parameters of the largest block under ZeRO-3, whole; `border_bytes`: a stage's output. Not `exact`:
    micro-batches in flight by closed form."""
    alive: tuple[tuple[float, ...], ...] = ((),)
    if exact:
        alive = moments(layout, stack, micro_batches, rank)
    else:
        alive = ((about(layout.schedule, layout.pp, layout.vp, micro_batches, rank),) * layout.vp,)
    own = own_stages(layout, rank)
    costs = [stages[stage] for stage in own]
    activations = max(
        sum(count * cost.kept_bytes for count, cost in zip(moment, costs, strict=True)) for moment in alive
    )
    transient = max(cost.transient_bytes for cost in costs)
    logits = max(cost.logit_bytes for cost in costs)
    buffers = 0.0
    if layout.zero == 3 and (layout.pp == 1 or stack.name != "meshwright"):
        buffers += 2 * unit_bytes + unit_gradient_bytes
    if layout.pp > 1:
        buffers += 2 * border_bytes
        if stack.outputs_kept:
            buffers += border_bytes * max(map(sum, alive))
    step = {**state.step, "activations": activations, "logits": logits, "buffers": buffers, "temporaries": transient}
    update = {**state.update, "temporaries": update_bytes}
    kinds, when = (step, "backward pass") if sum(step.values()) >= sum(update.values()) else (update, "optimizer step")
    return RankMemory(pp_rank=rank, when=when, kinds={**kinds, "reserve": stack.reserve_bytes})
