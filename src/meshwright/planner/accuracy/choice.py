"""Would the planner have chosen well? Published grids: runs of one model and batch on as many GPUs, laid out otherwise.

A grid has one source, model, sequence, global batch, GPU count and precision; its rows differ in layout (kernels are
part of it). The planner's choice is the row it predicts to be fastest among those that ran; a row measured several
times counts with its mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.accuracy.judged import Judged

FEWEST = 5
"""Layouts of a grid: below, any order is right by luck too often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutGrid:
    """How the planner orders the layouts of one grid."""

    layouts: int
    rank_correlation: float
    """Spearman's: 1 = the measured order."""
    regret: float
    """Measured time of the layout predicted fastest, over the best measured one, minus 1."""


def choices(judged: Sequence[Judged]) -> list[LayoutGrid]:
    """The grids among measured rows."""
    grids: dict[object, dict[object, list[Judged]]] = {}
    for one in judged:
        plan, columns = one.row.plan, one.row.columns
        key = (one.row.source, plan.model, plan.recipe, plan.layout.world, columns.get("precision", ""))
        grids.setdefault(key, {}).setdefault((plan.layout, one.row.stack), []).append(one)
    return [_grid(list(layouts.values())) for layouts in grids.values() if len(layouts) >= FEWEST]


def _grid(layouts: list[list[Judged]]) -> LayoutGrid:
    predicted = [rows[0].step_s for rows in layouts]
    measured = [sum(one.row.step_s for one in rows) / len(rows) for rows in layouts]
    chosen = min(range(len(layouts)), key=predicted.__getitem__)
    return LayoutGrid(
        layouts=len(layouts),
        rank_correlation=spearman(predicted, measured),
        regret=measured[chosen] / min(measured) - 1,
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation of two rows of numbers; ties share their mean rank, and a constant row correlates with none."""
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
        for place in order[start : end + 1]:
            ranks[place] = (start + end) / 2
        start = end + 1
    return ranks
