"""Distribution of the planner's errors on published rows, by group of runs, and the coverage of its ranges.

A group's distribution is a mixture. Each of its models has the same weight, however many rows it has. So has one model
that nobody has run yet, whose errors are those of the next wider group.

The next model lies further out than those seen, since few models tell where they lie. So errors are moved away from the
median by sqrt(1 + 1 / k) for k models. A range narrows as more models are seen, and the claimed coverage is that on a
model that is left out whole.

Software that nobody has scored has the errors of all scored software, each with the same weight. Its range is no
narrower than that of any scored software with the same kind of model and number of nodes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from math import exp, log, sqrt
from typing import Literal, NamedTuple

from evaluation.holdout import model_key
from meshwright.planner.accuracy.published import JudgedRow
from meshwright.planner.step.prediction import POOLED_GROUP, RANGE_LEVEL, row_groups

What = Literal["time", "memory"]
STEPS = 40
"""Number of even steps between the quantiles."""
EDGE = round((1 - RANGE_LEVEL) / 2 * STEPS)
"""The step at which a range begins, and the number of steps before the last at which it ends."""
BUSY = "nanotron"
"""Software whose rows are excluded from the pool of all software.
Its runs on several nodes of the Ultra-Scale grid measure a busy cluster (docs/accuracy.md).
"""


class RowError(NamedTuple):
    """One row: its groups, its model, and the logarithm of measured over predicted."""

    groups: tuple[str, ...]
    model: tuple[object, ...]
    error: float


Weighted = list[tuple[float, float]]
"""Errors with weights that add up to 1."""


def row_errors(judged: Iterable[object], what: What) -> list[RowError]:
    """Return the errors of predicted rows that have a step time, or a peak."""
    errors = []
    for entry in judged:
        if not isinstance(entry, JudgedRow):
            continue
        row = entry.row
        error = entry.step_error if what == "time" else entry.memory_error if row.part == "peak" else None
        if error is None:
            continue
        plan, stack = row.plan, row.stack.name
        groups = row_groups(stack, routed=plan.model.moe is not None, nodes=plan.cluster.nodes)
        if what == "time" and stack == BUSY and plan.cluster.nodes > 1:
            groups = tuple(group for group in groups if not group.startswith(POOLED_GROUP))
        errors.append(RowError(groups, model_key(plan.model), -log(1 + error)))
    return errors


def distributions(rows: Sequence[RowError], wanted: Collection[str] = ()) -> dict[str, Weighted]:
    """Return the distribution of every group that has rows, or of those wanted."""
    members: dict[str, dict[tuple[object, ...], list[float]]] = {}
    parents: dict[str, tuple[str, ...]] = {}
    for row in rows:
        for number, group in enumerate(row.groups):
            model = row.model if not group.startswith(POOLED_GROUP) else (row.groups[0].partition(",")[0], row.model)
            members.setdefault(group, {}).setdefault(model, []).append(row.error)
            parents[group] = (*row.groups[number + 1 :], *_pool(row)) if group != POOLED_GROUP else ()
    mixtures: dict[str, Weighted] = {}

    def mixture(group: str) -> Weighted:
        if group not in mixtures:
            sets = _sets(group, members[group])
            parent = next((wider for wider in parents[group] if wider in members and wider != group), None)
            share = 1 / (len(sets) + (parent is not None))
            seen = [
                (error, share / len(models) / len(errors)) for models in sets for errors in models for error in errors
            ]
            unseen = [(error, weight * share) for error, weight in mixture(parent)] if parent else []
            mixtures[group] = sorted(seen + unseen)
        return mixtures[group]

    def widened(group: str) -> Weighted:
        return _widened(mixture(group), sqrt(1 + 1 / len(_sets(group, members[group]))))

    def stretched(group: str) -> Weighted:
        beside = (_width(widened(scored)) for scored in members if _scored_beside(scored, group))
        distribution = widened(group)
        return _widened(distribution, max(1.0, max(beside, default=0.0) / (_width(distribution) or 1.0)))

    return {group: stretched(group) for group in sorted(members) if group in wanted or not wanted}


def _scored_beside(group: str, pool: str) -> bool:
    """Return whether a group is scored software of the same kind and number of nodes as a pool.

    A pool stands for software without rows. Less is known of that, so its range is no narrower. A busy cluster tells
    nothing about others.
    """
    software, _, kind = group.partition(", ")
    if not pool.startswith(POOLED_GROUP) or software in (POOLED_GROUP, BUSY):
        return False
    return kind == pool.partition(", ")[2] if pool != POOLED_GROUP else "," not in kind


def _width(weighted: Weighted) -> float:
    points = quantiles(weighted)
    return points[STEPS - EDGE] - points[EDGE]


def _sets(group: str, errors: dict[tuple[object, ...], list[float]]) -> list[list[list[float]]]:
    """Group errors by what has one weight: a model, or in a pool, a software with its models."""
    sets: dict[object, list[list[float]]] = {}
    for model, of_model in errors.items():
        sets.setdefault(model[0] if group.startswith(POOLED_GROUP) else model, []).append(of_model)
    return list(sets.values())


def _pool(row: RowError) -> tuple[str, ...]:
    """Return the groups that stand in for a row whose own groups have no rows."""
    return row_groups(POOLED_GROUP, routed="experts" in row.groups[0], nodes=1)[-2:]


def _widened(weighted: Weighted, times: float) -> Weighted:
    middle = quantiles(weighted)[STEPS // 2]
    return [(middle + times * (error - middle), weight) for error, weight in weighted]


def quantiles(weighted: Weighted, steps: int = STEPS) -> list[float]:
    """Return the quantiles at even steps, from the least to the greatest error."""
    sums = list(accumulate(weight for _, weight in weighted))
    points, number = [], 0
    for step in range(steps + 1):
        while number < len(sums) - 1 and sums[number] < step / steps * sums[-1]:
            number += 1
        points.append(weighted[number][0])
    return points


def table(judged: Sequence[object]) -> dict[str, object]:
    """Return the table that planner/step/prediction.py reads."""
    tables: dict[str, object] = {}
    for what in ("time", "memory"):
        rows = row_errors(judged, what)
        tables[what] = {
            group: {
                "rows": sum(group in row.groups for row in rows),
                "models": len({row.model for row in rows if group in row.groups}),
                "quantiles": [round(point, 4) for point in quantiles(weighted)],
            }
            for group, weighted in distributions(rows).items()
        }
    return tables


LEFT_OUT = "software left out"
"""Name of the line for ranges made without any row of their software."""


class Coverage(NamedTuple):
    """Share of rows within their range, which was made without the model of the row."""

    rows: int
    share: float
    width: float
    """Median of high over low."""


def coverage(judged: Sequence[object], what: What) -> dict[str, Coverage]:
    """Return the coverage by group, of all rows (""), and of ranges made without any row of the software (LEFT_OUT).

    Groups are the narrowest ones except for nodes.
    """
    rows = row_errors(judged, what)
    inside: dict[str, list[Mark]] = {}
    for model in sorted({row.model for row in rows}, key=str):
        left = [row for row in rows if row.model == model]
        for row, mark in _marks(left, [row for row in rows if row.model != model]):
            for name in ("", row.groups[1]):
                inside.setdefault(name, []).append(mark)
    for software in sorted({_software(row) for row in rows}):
        left, others = ([row for row in rows if (_software(row) == software) is same] for same in (True, False))
        if others:
            inside.setdefault(LEFT_OUT, []).extend(mark for row, mark in _marks(left, others) if _pooled(row))
    return {name: _coverage(marks) for name, marks in sorted(inside.items()) if marks}


Mark = tuple[bool, float]
"""(whether a row lies within its range, the logarithm of high over low)."""


def _software(row: RowError) -> str:
    return row.groups[0].partition(",")[0]


def _pooled(row: RowError) -> bool:
    return any(group.startswith(POOLED_GROUP) for group in row.groups)


def _marks(left: Sequence[RowError], others: Sequence[RowError]) -> Iterator[tuple[RowError, Mark]]:
    """Yield each row of `left` with its mark, by ranges made of `others`."""
    have = {group for row in others for group in row.groups}
    used = {row: next(group for group in (*row.groups, *_pool(row)) if group in have) for row in left}
    edges = {group: quantiles(weighted) for group, weighted in distributions(others, set(used.values())).items()}
    for row in left:
        low, high = edges[used[row]][EDGE], edges[used[row]][STEPS - EDGE]
        yield row, (low <= row.error <= high, high - low)


def _coverage(marks: Sequence[Mark]) -> Coverage:
    widths = sorted(width for _, width in marks)
    return Coverage(len(marks), sum(hit for hit, _ in marks) / len(marks), exp(widths[len(widths) // 2]))
