"""From the planner's errors on published rows: quantiles by group of runs, and how many rows lie within the ranges.

A group's distribution is a mixture: each of its models counts as one, however many rows it has, and one model that
nobody has run yet counts as one, too. Of that one the errors are those of the next wider group. The next model lies
further out than those seen, since where they lie is known from few: errors are moved away from the median by
sqrt(1 + 1 / k) for k models. So a range narrows as more models were seen, and coverage on a model that is left out
whole is what is claimed.

Software that nobody has scored has the errors of all scored software, each of which counts as one. Its range is no
narrower than that of any scored software with the same kind of model and number of nodes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from math import exp, log, sqrt
from typing import Literal, NamedTuple

from meshwright.planner.accuracy.holdout import kind
from meshwright.planner.accuracy.judged import Judged
from meshwright.planner.step.error_ranges import LEVEL, POOL, row_groups

What = Literal["time", "memory"]
STEPS = 40
"""Quantiles are kept at so many even steps."""
EDGE = round((1 - LEVEL) / 2 * STEPS)
"""The step at which a range begins, and before the last at which it ends."""
BUSY = "nanotron"
"""Runs on several nodes of the Ultra-Scale grid measure a busy cluster (docs/accuracy.md): they speak of no other
software."""


class RowError(NamedTuple):
    """One row: the groups it belongs to, its model, the logarithm of measured over predicted."""

    groups: tuple[str, ...]
    model: tuple[object, ...]
    error: float


Weighted = list[tuple[float, float]]
"""Errors with weights that add up to 1."""


def errors(judged: Iterable[object], what: What) -> list[RowError]:
    """Of the rows that were predicted and that give a step time, or a peak."""
    found = []
    for one in judged:
        if not isinstance(one, Judged):
            continue
        error = one.step_error if what == "time" else one.memory_error if one.row.part == "peak" else None
        if error is None:
            continue
        plan, stack = one.row.plan, one.row.stack.name
        groups = row_groups(stack, routed=plan.model.moe is not None, nodes=plan.cluster.nodes)
        if what == "time" and stack == BUSY and plan.cluster.nodes > 1:
            groups = tuple(group for group in groups if not group.startswith(POOL))
        found.append(RowError(groups, kind(plan.model), -log(1 + error)))
    return found


def distributions(rows: Sequence[RowError], wanted: Collection[str] = ()) -> dict[str, Weighted]:
    """Of every group that has rows, or of those wanted."""
    members: dict[str, dict[tuple[object, ...], list[float]]] = {}
    parents: dict[str, tuple[str, ...]] = {}
    for row in rows:
        for place, group in enumerate(row.groups):
            model = row.model if not group.startswith(POOL) else (row.groups[0].partition(",")[0], row.model)
            members.setdefault(group, {}).setdefault(model, []).append(row.error)
            parents[group] = (*row.groups[place + 1 :], *_pool(row)) if group != POOL else ()
    found: dict[str, Weighted] = {}

    def of(group: str) -> Weighted:
        if group not in found:
            sets = _sets(group, members[group])
            parent = next((one for one in parents[group] if one in members and one != group), None)
            share = 1 / (len(sets) + (parent is not None))
            own = [
                (error, share / len(models) / len(errors)) for models in sets for errors in models for error in errors
            ]
            beyond = [(error, weight * share) for error, weight in of(parent)] if parent else []
            found[group] = sorted(own + beyond)
        return found[group]

    def widened(group: str) -> Weighted:
        return _widened(of(group), sqrt(1 + 1 / len(_sets(group, members[group]))))

    def stretched(group: str) -> Weighted:
        beside = (_width(widened(one)) for one in members if _scored_beside(one, group))
        own = widened(group)
        return _widened(own, max(1.0, max(beside, default=0.0) / (_width(own) or 1.0)))

    return {group: stretched(group) for group in sorted(members) if group in wanted or not wanted}


def _scored_beside(group: str, pool: str) -> bool:
    """Whether a group is of scored software, and of the same kind and number of nodes as one that stands for software
    without rows: of that one less is known, so its range is no narrower. A busy cluster says nothing of others."""
    software, _, kind = group.partition(", ")
    if not pool.startswith(POOL) or software in (POOL, BUSY):
        return False
    return kind == pool.partition(", ")[2] if pool != POOL else "," not in kind


def _width(weighted: Weighted) -> float:
    found = quantiles(weighted)
    return found[STEPS - EDGE] - found[EDGE]


def _sets(group: str, errors: dict[tuple[object, ...], list[float]]) -> list[list[list[float]]]:
    """What counts as one: a model; of rows that stand for software nobody has scored, a software with its models."""
    found: dict[object, list[list[float]]] = {}
    for model, own in errors.items():
        found.setdefault(model[0] if group.startswith(POOL) else model, []).append(own)
    return list(found.values())


def _pool(row: RowError) -> tuple[str, ...]:
    """Groups that stand for it where its own have no rows."""
    return row_groups(POOL, routed="experts" in row.groups[0], nodes=1)[-2:]


def _widened(weighted: Weighted, times: float) -> Weighted:
    middle = quantiles(weighted)[STEPS // 2]
    return [(middle + times * (error - middle), weight) for error, weight in weighted]


def quantiles(weighted: Weighted, steps: int = STEPS) -> list[float]:
    """At even steps from the least to the greatest."""
    sums = list(accumulate(weight for _, weight in weighted))
    found, place = [], 0
    for step in range(steps + 1):
        while place < len(sums) - 1 and sums[place] < step / steps * sums[-1]:
            place += 1
        found.append(weighted[place][0])
    return found


def table(judged: Sequence[object]) -> dict[str, object]:
    """What error_ranges reads."""
    found: dict[str, object] = {}
    for what in ("time", "memory"):
        rows = errors(judged, what)
        found[what] = {
            group: {
                "rows": sum(group in row.groups for row in rows),
                "models": len({row.model for row in rows if group in row.groups}),
                "quantiles": [round(one, 4) for one in quantiles(weighted)],
            }
            for group, weighted in distributions(rows).items()
        }
    return found


LEFT_OUT = "software left out"
"""The line of rows whose ranges were made without any row of their software."""


class Coverage(NamedTuple):
    """Rows of models that the range was made without, and the share of them that lies within it."""

    rows: int
    share: float
    width: float
    """Median of high over low."""


def coverage(judged: Sequence[object], what: What) -> dict[str, Coverage]:
    """By the narrowest group but for nodes, of all (""), and of all with ranges made without any row of their software
    (LEFT_OUT)."""
    rows = errors(judged, what)
    inside: dict[str, list[Mark]] = {}
    for model in sorted({row.model for row in rows}, key=str):
        left = [row for row in rows if row.model == model]
        for row, mark in _marks(left, [row for row in rows if row.model != model]):
            for name in ("", row.groups[1]):
                inside.setdefault(name, []).append(mark)
    for software in sorted({_software(row) for row in rows}):
        left, others = ([row for row in rows if (_software(row) == software) is own] for own in (True, False))
        if others:
            inside.setdefault(LEFT_OUT, []).extend(mark for row, mark in _marks(left, others) if _pooled(row))
    return {name: _coverage(marks) for name, marks in sorted(inside.items()) if marks}


Mark = tuple[bool, float]
"""Whether a row lies within its range; the logarithm of high over low."""


def _software(row: RowError) -> str:
    return row.groups[0].partition(",")[0]


def _pooled(row: RowError) -> bool:
    """Whether a row speaks of other software."""
    return any(group.startswith(POOL) for group in row.groups)


def _marks(left: Sequence[RowError], others: Sequence[RowError]) -> Iterator[tuple[RowError, Mark]]:
    """Rows with ranges made of others."""
    have = {group for row in others for group in row.groups}
    used = {row: next(one for one in (*row.groups, *_pool(row)) if one in have) for row in left}
    edges = {group: quantiles(one) for group, one in distributions(others, set(used.values())).items()}
    for row in left:
        low, high = edges[used[row]][EDGE], edges[used[row]][STEPS - EDGE]
        yield row, (low <= row.error <= high, high - low)


def _coverage(marks: Sequence[Mark]) -> Coverage:
    widths = sorted(width for _, width in marks)
    return Coverage(len(marks), sum(hit for hit, _ in marks) / len(marks), exp(widths[len(widths) // 2]))
