"""Which rows a calibration may see, and which 20 of them it is fitted to. Written down before anything was fitted.

Of each cluster, models in order of their parameters and GPU counts in order: every second of either (the second, the
fourth, ...) is held out whole. Rows of a held-out model or a held-out GPU count are never fitted to. Where a cluster
has one model and one GPU count, nothing can be held out whole: then at most half of its rows are fitted to.
Of the rows that may be seen, those are taken that represent the others best: one after the other, the row that most
shortens the distance of all to their nearest chosen one, in the logarithms of model sizes, batch and layout. No
measured time plays a part.
"""

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

from meshwright.planner.accuracy.calibration import MOST_ROWS, Calibration, Fitted, fit
from meshwright.planner.accuracy.published import PublishedRow
from meshwright.planner.accuracy.source_families import cluster_of
from meshwright.spec.shape import ModelShape


class CalibrationRows(NamedTuple):
    """Rows to fit to, and how many rows each stands for."""

    rows: list[PublishedRow]
    stands_for: list[float]


def held_out(rows: Sequence[PublishedRow]) -> list[PublishedRow]:
    """Of one cluster's rows those that no calibration may see."""
    models = sorted({kind(row.plan.model) for row in rows})[1::2]
    counts = sorted({row.plan.layout.world for row in rows})[1::2]
    return [row for row in rows if kind(row.plan.model) in models or row.plan.layout.world in counts]


def kind(shape: ModelShape) -> tuple[float, int, int]:
    """Models of one size with other positions are one model."""
    weights = shape.layers * (shape.hidden**2 + shape.hidden * shape.ffn)
    experts = shape.moe.experts if shape.moe else 0
    return float(weights * max(1, experts)), shape.layers, shape.hidden


def chosen(rows: Sequence[PublishedRow]) -> CalibrationRows:
    """The rows of one cluster to fit to."""
    timed = [row for row in rows if row.step_s > 0]
    unseen = {id(row) for row in held_out(timed)}
    open_rows = [row for row in timed if id(row) not in unseen]
    most = MOST_ROWS if unseen else min(MOST_ROWS, len(open_rows) // 2)
    return represent(open_rows, most)


def represent(rows: Sequence[PublishedRow], most: int) -> CalibrationRows:
    """At most so many rows, the best representatives of all; the first of equals. Each row belongs to its nearest."""
    if not (rows and most):
        return CalibrationRows([], [])
    places = [_place(row) for row in rows]
    spans = [max(column) - min(column) or 1.0 for column in zip(*places, strict=True)]
    places = [[value / span for value, span in zip(place, spans, strict=True)] for place in places]
    nearest = [float(len(spans))] * len(rows)
    found: list[int] = []
    apart = [[sum(abs(a - b) for a, b in zip(p, q, strict=True)) for q in places] for p in places]
    while len(found) < min(most, len(rows)):
        gains = [sum(n - d for n, d in zip(nearest, apart[i], strict=True) if d < n) for i in range(len(rows))]
        best = max((i for i in range(len(rows)) if i not in found), key=lambda i: (gains[i], -i))
        found.append(best)
        nearest = [min(n, d) for n, d in zip(nearest, apart[best], strict=True)]
    stands_for = [0.0] * len(found)
    for place in apart:
        stands_for[min(range(len(found)), key=lambda k: place[found[k]])] += 1.0
    return CalibrationRows([rows[i] for i in found], stands_for)


def _place(row: PublishedRow) -> list[float]:
    """Where a run stands among all models, batches and layouts."""
    shape, layout, recipe = row.plan.model, row.plan.layout, row.plan.recipe
    sizes = (
        shape.hidden, shape.layers, recipe.sequence, layout.micro_batches(recipe.global_batch),
        layout.micro_batch_of(recipe.global_batch), layout.tp, layout.pp, layout.dp, layout.cp, layout.vp,
    )  # fmt: skip
    kinds = (
        layout.sp, layout.zero == 3, layout.recompute == "full", row.stack.attention == "flash",
        row.stack.passes <= 1, "8" in row.columns.get("precision", ""),
    )  # fmt: skip
    return [log2(size) for size in sizes] + [float(kind) for kind in kinds]


def calibrate(rows: Sequence[PublishedRow], date: str, fewest: int = 6) -> Calibration:
    """A calibration of every cluster with at least `fewest` rows that may be seen."""
    clusters: dict[str, list[PublishedRow]] = {}
    for row in rows:
        if row.step_s > 0 and row.part != "activations":
            clusters.setdefault(cluster_of(row), []).append(row)
    found: dict[str, Fitted] = {}
    for name, own in sorted(clusters.items()):
        some = chosen(own)
        if len(some.rows) >= fewest:
            found[name] = fit(some.rows, some.stands_for)
    return Calibration(clusters=found, name="calibrated", date=date)
