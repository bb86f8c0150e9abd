"""Rows that a calibration may see, and the 20 of them that it is fitted to. Fixed before anything was fitted.

In each cluster, sort models by their parameters, and GPU counts. Every second model and every second count (the second,
the fourth, ...) is held out whole: no row of either is ever fitted to. A cluster with one model and one GPU count can
hold out nothing whole, so at most half of its rows are fitted to.

Of the visible rows, those that represent the others best are taken. Each next row is the one that most shortens the
distance of all rows to their nearest chosen one, in the logarithms of model sizes, batch and layout. Measured times
play no part.
"""

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

from meshwright.planner.accuracy.calibration import MOST_ROWS, Calibration, ClusterFit, fit
from meshwright.planner.accuracy.published import PublishedRow, cluster_of
from meshwright.spec.model.shape import ModelShape


class CalibrationRows(NamedTuple):
    """Rows to fit to, and how many rows each stands for."""

    rows: list[PublishedRow]
    stands_for: list[float]


def held_out(rows: Sequence[PublishedRow]) -> list[PublishedRow]:
    """Return the rows of a cluster that no calibration may see."""
    models = sorted({model_key(row.plan.model) for row in rows})[1::2]
    counts = sorted({row.plan.layout.world for row in rows})[1::2]
    return [row for row in rows if model_key(row.plan.model) in models or row.plan.layout.world in counts]


def model_key(shape: ModelShape) -> tuple[float, int, int]:
    """Return a key of the sizes of a model. Models that differ only in positions are one."""
    weights = shape.layers * (shape.hidden**2 + shape.hidden * shape.ffn)
    experts = shape.moe.experts if shape.moe else 0
    return float(weights * max(1, experts)), shape.layers, shape.hidden


def choose_rows(rows: Sequence[PublishedRow]) -> CalibrationRows:
    """Choose the rows of one cluster to fit to."""
    timed = [row for row in rows if row.step_s > 0]
    unseen = {id(row) for row in held_out(timed)}
    open_rows = [row for row in timed if id(row) not in unseen]
    most = MOST_ROWS if unseen else min(MOST_ROWS, len(open_rows) // 2)
    return represent(open_rows, most)


def represent(rows: Sequence[PublishedRow], most: int) -> CalibrationRows:
    """Choose at most `most` representatives of all rows, the first of equals. Each row belongs to its nearest one."""
    if not (rows and most):
        return CalibrationRows([], [])
    points = [_coordinates(row) for row in rows]
    spans = [max(column) - min(column) or 1.0 for column in zip(*points, strict=True)]
    points = [[x / span for x, span in zip(point, spans, strict=True)] for point in points]
    nearest = [float(len(spans))] * len(rows)
    taken: list[int] = []
    apart = [[sum(abs(a - b) for a, b in zip(p, q, strict=True)) for q in points] for p in points]
    while len(taken) < min(most, len(rows)):
        gains = [sum(n - d for n, d in zip(nearest, apart[i], strict=True) if d < n) for i in range(len(rows))]
        best = max((i for i in range(len(rows)) if i not in taken), key=lambda i: (gains[i], -i))
        taken.append(best)
        nearest = [min(n, d) for n, d in zip(nearest, apart[best], strict=True)]
    stands_for = [0.0] * len(taken)
    for distances in apart:
        stands_for[min(range(len(taken)), key=lambda k: distances[taken[k]])] += 1.0
    return CalibrationRows([rows[i] for i in taken], stands_for)


def _coordinates(row: PublishedRow) -> list[float]:
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
    """Calibrate every cluster with at least `fewest` visible rows."""
    clusters: dict[str, list[PublishedRow]] = {}
    for row in rows:
        if row.step_s > 0 and row.part != "activations":
            clusters.setdefault(cluster_of(row), []).append(row)
    fits: dict[str, ClusterFit] = {}
    for name, members in sorted(clusters.items()):
        sample = choose_rows(members)
        if len(sample.rows) >= fewest:
            fits[name] = fit(sample.rows, sample.stands_for)
    return Calibration(clusters=fits, name="calibrated", date=date)
