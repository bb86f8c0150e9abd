"""Quality of the planner's choice of a layout, on published grids: runs of one model in several layouts.

A grid has one source, model, sequence, global batch, GPU count and precision. Its rows differ in layout, kernels
included. The planner's choice is the row that it predicts to be fastest among those that ran. A layout that was
measured several times counts with its mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.accuracy.published import JudgedRow

FEWEST = 5
"""Layouts of a grid. With fewer, any order is right by luck too often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutGrid:
    """The planner's order of the layouts of one grid."""

    layouts: int
    rank_correlation: float
    """Spearman's: 1 = the measured order."""
    regret: float
    """Measured time of the layout predicted fastest, over the best measured one, minus 1."""


def layout_grids(judged: Sequence[JudgedRow]) -> list[LayoutGrid]:
    """Group measured rows into grids, and compare the predicted with the measured order in each."""
    grids: dict[object, dict[object, list[JudgedRow]]] = {}
    for entry in judged:
        row, plan, columns = entry.row, entry.row.plan, entry.row.columns
        key = (row.source, plan.model, plan.recipe, plan.layout.world, columns.get("precision", ""))
        grids.setdefault(key, {}).setdefault((plan.layout, row.stack), []).append(entry)
    return [_grid(list(layouts.values())) for layouts in grids.values() if len(layouts) >= FEWEST]


def _grid(layouts: list[list[JudgedRow]]) -> LayoutGrid:
    predicted = [rows[0].step_s for rows in layouts]
    measured = [sum(entry.row.step_s for entry in rows) / len(rows) for rows in layouts]
    chosen = min(range(len(layouts)), key=predicted.__getitem__)
    return LayoutGrid(
        layouts=len(layouts),
        rank_correlation=spearman(predicted, measured),
        regret=measured[chosen] / min(measured) - 1,
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation of two rows of numbers. Ties share their mean rank; a constant row gives 0."""
    x, y = _ranks(a), _ranks(b)
    middle = (len(x) - 1) / 2
    both = sum((p - middle) * (q - middle) for p, q in zip(x, y, strict=True))
    spread = (sum((p - middle) ** 2 for p in x) * sum((q - middle) ** 2 for q in y)) ** 0.5
    return both / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for number in order[start : end + 1]:
            ranks[number] = (start + end) / 2
        start = end + 1
    return ranks
