"""The pipeline of one step as boxes: as the planner plays it, and as a profile saw it run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.observe.shared_document import Ran, RankRecord, SharedDocument
from meshwright.planner.cost.block_time import ranks_of
from meshwright.planner.step.predict import Estimator
from meshwright.spec import Plan
from meshwright.spec.places import pipeline_ranks
from meshwright.spec.replay import EVEN, replay
from meshwright.spec.schedule import Action, schedule

MOST_BOXES = 20_000
"""Of all ranks; a longer step is shown from its beginning."""
Box = tuple[str, int, int, float, float]
"""kind, stage, micro-batch, start, length."""
PASSES = ("F", "B", "W", "BW")
MADE_ELSEWHERE = ("F", "B", "BW")
"""Passes that read what a neighbouring stage sends."""


def planned_timeline(of: Estimator, plan: Plan, *, seconds: bool) -> dict[str, Any]:
    """The schedule with the planner's seconds, reductions and optimizer behind it; not `seconds`: every F, B and W as
    long as the others, since the device is not known."""
    layout, recipe = plan.layout, plan.recipe
    m = layout.micro_batches(recipe.global_batch)
    send_s = 0.0
    if seconds and layout.pp > 1:
        parts, _ = of.parts(layout)
        send_s = of.links.send_seconds(parts.between_bytes, ranks_of(layout, "pp")[1])
    played = replay(_actions(plan, m), of.stages(layout) if seconds else EVEN, send_s)
    boxes: list[list[Box]] = [
        [(s.action.kind, s.action.stage, s.action.micro_batch, s.start_s, s.end_s - s.start_s) for s in own]
        for own in played.spans
    ]
    if seconds:
        time, _ = of.measure(layout)
        for own in boxes:
            own.extend(
                _behind(
                    played.total_s, (("gradients", time.gradients_s), ("optimizer", time.optimizer_s + time.muon_s))
                )
            )
    return _document(pipeline_ranks(layout), boxes, "seconds" if seconds else "passes", played.bubble)


def _actions(plan: Plan, m: int) -> tuple[tuple[Action, ...], ...]:
    layout = plan.layout
    if layout.pp > 1:
        return schedule(layout.schedule, layout.pp, m, layout.vp)
    return (tuple(Action(kind, 0, i) for i in range(m) for kind in ("F", "BW")),)


def _behind(start: float, parts: Iterable[tuple[str, float]]) -> Iterable[Box]:
    for name, length in parts:
        if length > 0:
            yield (name, -1, -1, start, length)
            start += length


def executed_timeline(plan: Plan, found: SharedDocument) -> dict[str, Any] | None:
    """The last whole step that all pipeline places have spans of, from its first pass on; None without spans."""
    ranks = [next((one for one in found.ranks if one.rank == rank), None) for rank in pipeline_ranks(plan.layout)]
    told = [one for one in ranks if one is not None and one.spans]
    if not told or len(told) < len(ranks):
        return None
    steps = [_steps(one) for one in told]
    last = min(len(of_rank) for of_rank in steps) - 1
    chosen = [of_rank[last] for of_rank in steps]
    first = min(span.start_s for own in chosen for span in own)
    boxes = [[(s.name, s.stage, s.micro_batch, s.start_s - first, s.seconds) for s in own] for own in chosen]
    made = _document([one.rank for one in told], boxes, "seconds", found.bubble_fraction)
    for own, spans, waits in zip(chosen, made["spans"], _waits(chosen), strict=True):
        for _, box, wait_s in zip(own, spans, waits, strict=False):
            if wait_s > 0:
                box.append(_short(wait_s))
    return made


def _waits(ranks: Sequence[Sequence[Ran]]) -> list[list[float]]:
    """Seconds at the beginning of each span in which what it reads was not made: it began before the same micro-batch
    had left the stage in front of it, or behind it in a backward pass."""
    ends = {(_way(span.name), span.stage, span.micro_batch): span.end_s for own in ranks for span in own}
    found = []
    for own in ranks:
        waits = []
        for span in own:
            before = span.stage - 1 if span.name == "F" else span.stage + 1
            ready = ends.get((_way(span.name), before, span.micro_batch), 0.0) if span.name in MADE_ELSEWHERE else 0.0
            waits.append(min(span.seconds, max(0.0, ready - span.start_s)))
        found.append(waits)
    return found


def _way(name: str) -> str:
    return "backward" if name in ("B", "BW") else name


def _steps(rank: RankRecord) -> list[list[Ran]]:
    """A rank's spans by step: in each step a pass of a micro-batch comes once, what stands behind goes with it."""
    found: list[list[Ran]] = [[]]
    seen: Counter[tuple[str, int, int]] = Counter()
    for span in sorted(rank.spans, key=lambda one: one.start_s):
        if span.name in PASSES:
            key = span.name, span.stage, span.micro_batch
            if seen[key] == len(found):
                found.append([])
            seen[key] += 1
        found[-1].append(span)
    return found


def _document(ranks: Sequence[int], boxes: Sequence[Sequence[Box]], unit: str, bubble: float | None) -> dict[str, Any]:
    most = MOST_BOXES // max(1, len(boxes))
    total = max((start + length for own in boxes for *_, start, length in own), default=0.0)
    return {
        "unit": unit,
        "total": total,
        "bubble": bubble,
        "cut": any(len(own) > most for own in boxes),
        "ranks": list(ranks),
        "spans": [
            [[kind, stage, i, _short(start), _short(length)] for kind, stage, i, start, length in own[:most]]
            for own in boxes
        ],
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.6g}")
