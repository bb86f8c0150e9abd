"""Score of the planner on published rows: errors of step time and memory, out-of-memory errors, choice of layout.

All shares are fractions: 0.05 is 5 %. Nothing is left out: rows that cannot be scored are counted with their reason.

The choice of a layout is scored on grids. A grid has one source, model, sequence, global batch, GPU count and
precision. Its rows differ in layout, kernels included. The planner's choice is the row that it predicts to be fastest
among those that ran. A layout that was measured several times counts with its mean.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.accuracy.calibration import Calibration
from meshwright.planner.accuracy.published import JudgedRow, PublishedRow, Unreadable, duplicate_of
from meshwright.planner.cost.exchanges import links_of
from meshwright.planner.cost.speeds import speeds_of
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.memory.held import STATES

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
        # Equal values share the middle of their ranks, as Spearman's coefficient asks.
        for number in order[start : end + 1]:
            ranks[number] = (start + end) / 2
        start = end + 1
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score of the rows of a source. None = nothing to score."""

    n: int
    """All rows, including those that cannot be scored."""
    step_time_mape: float | None
    """Mean of the absolute relative errors."""
    step_time_median: float | None
    """Median of the absolute relative errors."""
    memory_mape: float | None
    memory_p95: float | None
    """The error that 95 % of the rows stay below."""
    oom_accuracy: float | None
    """Share of correct predictions among rows that ran or ran out of memory."""
    false_fits: float | None
    """Share of the rows that ran out of memory for which the planner predicts a fit."""
    rank_correlation: float | None
    """Spearman's, predicted with measured step times: median of the source's grids."""
    regret: float | None
    """Measured time of the chosen layout over the best measured, minus 1: median of the grids."""


def judge(
    rows: Iterable[PublishedRow | Unreadable], calibration: Calibration | None = None
) -> list[JudgedRow | Unreadable]:
    """Judge every row. A row of a table of memory that repeats a row at hand is not scored twice."""
    rows = list(rows)
    runs = {row.columns.get("id") for row in rows if "quantity" not in row.columns}
    estimators: dict[object, Estimator] = {}
    scored: list[JudgedRow | Unreadable] = []
    for row in rows:
        twin = duplicate_of(row)
        if twin and twin in runs:
            scored.append(_unreadable(row, "repeats the peak of a run, which is scored there"))
        elif isinstance(row, Unreadable):
            scored.append(row)
        else:
            try:
                scored.append(_judged(row, calibration, estimators))
            # A row that the planner refuses or fails on counts as unscored. Dropping it would flatter the score.
            except (MeshwrightError, ValueError, ArithmeticError, LookupError) as error:
                scored.append(_unreadable(row, f"cannot be predicted: {error}"))
    return scored


def _unreadable(row: PublishedRow | Unreadable, reason: str) -> Unreadable:
    return Unreadable(source=row.source, reason=reason, columns=row.columns)


def _judged(row: PublishedRow, calibration: Calibration | None, estimators: dict[object, Estimator]) -> JudgedRow:
    # An estimator keeps costs between layouts, and tables have up to thousands of layouts of one model.
    key = (row.plan.model, row.plan.recipe, row.plan.cluster, row.stack, row.source)
    if key not in estimators:
        estimators[key] = estimator_of(row, calibration)
    estimator = estimators[key]
    prediction = estimator.predict(row.plan)
    return JudgedRow(
        row=row,
        step_s=prediction.step_s,
        part_value=_part(row, prediction, estimator),
        fits=prediction.fits,
        seen=calibration is not None and calibration.was_fitted_to(row),
    )


def estimator_of(row: PublishedRow, calibration: Calibration | None = None) -> Estimator:
    """Return the estimator for a row's model, recipe, cluster and software, zero-shot or calibrated."""
    plan, stack = row.plan, row.stack
    speeds, links = speeds_of(plan.cluster.device, row.stack.flash), links_of(plan.cluster)
    if calibration is not None:
        stack, speeds, links = calibration.adjust(row, stack, speeds, links)
    return build_estimator(plan, stack, speeds, links)


def _part(row: PublishedRow, prediction: Prediction, estimator: Estimator) -> float:
    first = prediction.memory[0].kinds
    if row.part == "activations":
        return first.get("activations", 0.0)
    if row.part == "states":
        return sum(first.get(kind, 0.0) for kind in STATES)
    if row.part == "activation share":
        plain = replace(row.plan, layout=replace(row.plan.layout, sp=False, recompute="none"))
        return first.get("activations", 0.0) / estimator.predict(plain).memory[0].kinds["activations"]
    return prediction.reported_bytes


def score(judged: Sequence[JudgedRow | Unreadable]) -> Score:
    """Score the rows of one source."""
    known = [entry for entry in judged if isinstance(entry, JudgedRow)]
    times = [abs(entry.step_error) for entry in known if entry.step_error is not None]
    memory = [abs(entry.memory_error) for entry in known if entry.memory_error is not None]
    ran = [entry for entry in known if not entry.row.out_of_memory and _ran(entry.row)]
    burst = [entry for entry in known if entry.row.out_of_memory]
    # A source without a single out-of-memory row has no accuracy: "all fits" would score 100 %.
    right = sum(entry.fits for entry in ran) + sum(not entry.fits for entry in burst)
    grids = layout_grids([entry for entry in known if entry.row.step_s])
    return Score(
        n=len(judged),
        step_time_mape=mean(times),
        step_time_median=quantile(times, 0.5),
        memory_mape=mean(memory),
        memory_p95=quantile(memory, 0.95),
        oom_accuracy=right / len(ran + burst) if burst else None,
        false_fits=sum(entry.fits for entry in burst) / len(burst) if burst else None,
        rank_correlation=quantile([grid.rank_correlation for grid in grids], 0.5),
        regret=quantile([grid.regret for grid in grids], 0.5),
    )


def _ran(row: PublishedRow) -> bool:
    return row.columns.get("status", "") == "ok" and row.part in ("", "peak")


def by_source(judged: Iterable[JudgedRow | Unreadable]) -> dict[str, list[JudgedRow | Unreadable]]:
    """Group rows by their column `source`, in their order."""
    sources: dict[str, list[JudgedRow | Unreadable]] = {}
    for entry in judged:
        source = entry.row.source if isinstance(entry, JudgedRow) else entry.source
        sources.setdefault(source, []).append(entry)
    return sources


def mean(values: Sequence[float]) -> float | None:
    """Return the mean. None = no values."""
    return sum(values) / len(values) if values else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return a quantile, linear between neighbours. None = no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
