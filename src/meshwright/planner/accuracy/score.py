"""The planner scored on published rows: errors of step time and memory, out-of-memory classification, choice of layout.

All shares are fractions: 0.05 is 5 %. Nothing is left out: what cannot be scored is counted with its reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.accuracy.calibration import Calibration
from meshwright.planner.accuracy.choice import choices
from meshwright.planner.accuracy.judged import Judged
from meshwright.planner.accuracy.published import PublishedRow, Unreadable, duplicate_of
from meshwright.planner.cost.links import links_of
from meshwright.planner.cost.speeds import speeds_of
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.ledger import STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Of the rows of a source; None where there is nothing to score."""

    n: int
    """Rows, those that cannot be scored included."""
    step_time_mape: float | None
    """Mean of the absolute relative errors."""
    step_time_median: float | None
    """Median of the same."""
    memory_mape: float | None
    memory_p95: float | None
    """The error that 95 % of the rows stay below."""
    oom_accuracy: float | None
    """Share of the rows that ran or ran out of memory of which the planner says so."""
    false_fits: float | None
    """Share of the rows that ran out of memory of which it says that they fit."""
    rank_correlation: float | None
    """Spearman's, predicted with measured step times, median of the source's grids."""
    regret: float | None
    """Measured time of the layout the planner would choose, over the best measured, minus 1; median of the grids."""


def judge(
    rows: Iterable[PublishedRow | Unreadable], calibration: Calibration | None = None
) -> list[Judged | Unreadable]:
    """Every row, judged; a row of a table of memory that repeats a row at hand is not scored twice."""
    rows = list(rows)
    runs = {row.columns.get("id") for row in rows if "quantity" not in row.columns}
    estimators: dict[object, Estimator] = {}
    found: list[Judged | Unreadable] = []
    for row in rows:
        twin = duplicate_of(row)
        if twin and twin in runs:
            found.append(_unreadable(row, "repeats the peak of a run, which is scored there"))
        elif isinstance(row, Unreadable):
            found.append(row)
        else:
            try:
                found.append(_judged(row, calibration, estimators))
            except (MeshwrightError, ValueError, ArithmeticError, LookupError) as error:
                found.append(_unreadable(row, f"cannot be predicted: {error}"))
    return found


def _unreadable(row: PublishedRow | Unreadable, reason: str) -> Unreadable:
    return Unreadable(source=row.source, reason=reason, columns=row.columns)


def _judged(row: PublishedRow, calibration: Calibration | None, estimators: dict[object, Estimator]) -> Judged:
    key = (row.plan.model, row.plan.recipe, row.plan.cluster, row.stack, row.source)
    if key not in estimators:
        estimators[key] = estimator_of(row, calibration)
    build_estimator = estimators[key]
    prediction = build_estimator.predict(row.plan)
    return Judged(
        row=row,
        step_s=prediction.step_s,
        part_value=_part(row, prediction, build_estimator),
        fits=prediction.fits,
        seen=calibration is not None and calibration.saw(row),
    )


def estimator_of(row: PublishedRow, calibration: Calibration | None = None) -> Estimator:
    """For a row's model, recipe, cluster and software, zero-shot or calibrated."""
    plan, stack = row.plan, row.stack
    speeds, links = speeds_of(plan.cluster.device, row.stack.flash), links_of(plan.cluster)
    if calibration is not None:
        stack, speeds, links = calibration.applied(row, stack, speeds, links)
    return build_estimator(plan, stack, speeds, links)


def _part(row: PublishedRow, prediction: Prediction, build_estimator: Estimator) -> float:
    first = prediction.memory[0].kinds
    if row.part == "activations":
        return first.get("activations", 0.0)
    if row.part == "states":
        return sum(first.get(kind, 0.0) for kind in STATES)
    if row.part == "activation share":
        plain = replace(row.plan, layout=replace(row.plan.layout, sp=False, recompute="none"))
        return first.get("activations", 0.0) / build_estimator.predict(plain).memory[0].kinds["activations"]
    return prediction.reported_bytes


def score(judged: Sequence[Judged | Unreadable]) -> Score:
    """Of rows of one source."""
    known = [one for one in judged if isinstance(one, Judged)]
    times = [abs(one.step_error) for one in known if one.step_error is not None]
    memory = [abs(one.memory_error) for one in known if one.memory_error is not None]
    ran = [one for one in known if not one.row.out_of_memory and _ran(one.row)]
    burst = [one for one in known if one.row.out_of_memory]
    right = sum(one.fits for one in ran) + sum(not one.fits for one in burst)
    grids = choices([one for one in known if one.row.step_s])
    return Score(
        n=len(judged),
        step_time_mape=mean(times),
        step_time_median=quantile(times, 0.5),
        memory_mape=mean(memory),
        memory_p95=quantile(memory, 0.95),
        oom_accuracy=right / len(ran + burst) if burst else None,
        false_fits=sum(one.fits for one in burst) / len(burst) if burst else None,
        rank_correlation=quantile([grid.rank_correlation for grid in grids], 0.5),
        regret=quantile([grid.regret for grid in grids], 0.5),
    )


def _ran(row: PublishedRow) -> bool:
    return row.columns.get("status", "") == "ok" and row.part in ("", "peak")


def by_source(judged: Iterable[Judged | Unreadable]) -> dict[str, list[Judged | Unreadable]]:
    """Rows by what their column `source` says, in the order they came."""
    found: dict[str, list[Judged | Unreadable]] = {}
    for one in judged:
        source = one.row.source if isinstance(one, Judged) else one.source
        found.setdefault(source, []).append(one)
    return found


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """Between neighbours linearly; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
