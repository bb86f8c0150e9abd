"""The pipeline of one step as boxes: as planned, and as profiled."""

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
"""Most boxes of all ranks. A longer step is cut after its beginning."""
Box = tuple[str, int, int, float, float]
"""(kind, stage, micro-batch, start, length)."""
PASSES = ("F", "B", "W", "BW")
MADE_ELSEWHERE = ("F", "B", "BW")
"""Passes that read what a neighbouring stage sends."""


def planned_timeline(planner: Estimator, plan: Plan, *, seconds: bool) -> dict[str, Any]:
    """Return the schedule with the planner's seconds, then reductions and optimizer.

    Without `seconds` every F, B and W is equally long, since the device is not known.
    """
    layout, recipe = plan.layout, plan.recipe
    m = layout.micro_batches(recipe.global_batch)
    send_s = 0.0
    if seconds and layout.pp > 1:
        parts, _ = planner.parts(layout)
        send_s = planner.links.send_seconds(parts.between_bytes, ranks_of(layout, "pp")[1])
    played = replay(_actions(plan, m), planner.stages(layout) if seconds else EVEN, send_s)
    boxes: list[list[Box]] = [
        [(s.action.kind, s.action.stage, s.action.micro_batch, s.start_s, s.end_s - s.start_s) for s in rank_boxes]
        for rank_boxes in played.spans
    ]
    if seconds:
        time, _ = planner.measure(layout)
        for rank_boxes in boxes:
            rank_boxes.extend(
                _boxes_after(
                    played.total_s, (("gradients", time.gradients_s), ("optimizer", time.optimizer_s + time.muon_s))
                )
            )
    return _document(pipeline_ranks(layout), boxes, "seconds" if seconds else "passes", played.bubble)


def _actions(plan: Plan, m: int) -> tuple[tuple[Action, ...], ...]:
    layout = plan.layout
    if layout.pp > 1:
        return schedule(layout.schedule, layout.pp, m, layout.vp)
    return (tuple(Action(kind, 0, i) for i in range(m) for kind in ("F", "BW")),)


def _boxes_after(start: float, parts: Iterable[tuple[str, float]]) -> Iterable[Box]:
    for name, length in parts:
        if length > 0:
            yield (name, -1, -1, start, length)
            start += length


def executed_timeline(plan: Plan, profile: SharedDocument) -> dict[str, Any] | None:
    """Return the last whole step of which all pipeline stages have spans. None without spans."""
    ranks = [
        next((record for record in profile.ranks if record.rank == rank), None) for rank in pipeline_ranks(plan.layout)
    ]
    recorded = [record for record in ranks if record is not None and record.spans]
    if not recorded or len(recorded) < len(ranks):
        return None
    steps = [_spans_by_step(record) for record in recorded]
    last = min(len(of_rank) for of_rank in steps) - 1
    chosen = [of_rank[last] for of_rank in steps]
    first = min(span.start_s for spans_of_rank in chosen for span in spans_of_rank)
    boxes = [
        [(s.name, s.stage, s.micro_batch, s.start_s - first, s.seconds) for s in spans_of_rank]
        for spans_of_rank in chosen
    ]
    document = _document([record.rank for record in recorded], boxes, "seconds", profile.bubble_fraction)
    for spans_of_rank, spans, waits in zip(chosen, document["spans"], _wait_seconds(chosen), strict=True):
        for _, box, wait_s in zip(spans_of_rank, spans, waits, strict=False):
            if wait_s > 0:
                box.append(_rounded(wait_s))
    return document


def _wait_seconds(ranks: Sequence[Sequence[Ran]]) -> list[list[float]]:
    """Return the seconds at the beginning of each span in which its input was not ready.

    The span began before the neighbouring stage had finished the same micro-batch.
    """
    ends = {(_direction(span.name), span.stage, span.micro_batch): span.end_s for spans in ranks for span in spans}
    waits_of_ranks = []
    for spans in ranks:
        waits = []
        for span in spans:
            before = span.stage - 1 if span.name == "F" else span.stage + 1
            ready = (
                ends.get((_direction(span.name), before, span.micro_batch), 0.0) if span.name in MADE_ELSEWHERE else 0.0
            )
            waits.append(min(span.seconds, max(0.0, ready - span.start_s)))
        waits_of_ranks.append(waits)
    return waits_of_ranks


def _direction(name: str) -> str:
    return "backward" if name in ("B", "BW") else name


def _spans_by_step(rank: RankRecord) -> list[list[Ran]]:
    """Split a rank's spans by step. A pass of a micro-batch occurs once per step; later parts go with it."""
    steps: list[list[Ran]] = [[]]
    seen: Counter[tuple[str, int, int]] = Counter()
    for span in sorted(rank.spans, key=lambda entry: entry.start_s):
        if span.name in PASSES:
            key = span.name, span.stage, span.micro_batch
            if seen[key] == len(steps):
                steps.append([])
            seen[key] += 1
        steps[-1].append(span)
    return steps


def _document(ranks: Sequence[int], boxes: Sequence[Sequence[Box]], unit: str, bubble: float | None) -> dict[str, Any]:
    most = MOST_BOXES // max(1, len(boxes))
    total = max((start + length for rank_boxes in boxes for *_, start, length in rank_boxes), default=0.0)
    return {
        "unit": unit,
        "total": total,
        "bubble": bubble,
        "cut": any(len(rank_boxes) > most for rank_boxes in boxes),
        "ranks": list(ranks),
        "spans": [
            [[kind, stage, i, _rounded(start), _rounded(length)] for kind, stage, i, start, length in rank_boxes[:most]]
            for rank_boxes in boxes
        ],
    }


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")
