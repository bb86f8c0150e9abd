"""Calibration: a few scalars of a cluster, fitted to the measured step times of at most 20 of its rows.

Least squares on the logarithms of the times, with a prior: every scalar is pulled to its zero-shot value, so that what
the rows say nothing about stays as it was. Found by damped Gauss-Newton steps on finite differences, which needs no
derivative and a tenth of the evaluations that a simplex search takes; nothing is random.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.planner.accuracy.published import Row
from meshwright.planner.accuracy.source_families import cluster_of
from meshwright.planner.cost.links import Links, links_of
from meshwright.planner.cost.speeds import Speeds, speeds_of
from meshwright.planner.cost.stack import Stack
from meshwright.planner.step.predict import Estimator
from meshwright.spec.errors import DataError

MOST_ROWS = 20
"""Of a cluster."""
NOISE = 0.04
"""Standard deviation, as a share, that a measured step time and the counting are expected to differ by."""
TRUSTS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Scales of all priors that are tried; 0 = stay zero-shot."""
FORMAT = 1


class Parameter(NamedTuple):
    """A scalar that a cluster may have of its own."""

    name: str
    """part.field"""
    kind: str
    """times: multiplied; plus: added, a share staying within 0 and 1, seconds above 0."""
    spread: float
    """Standard deviation of the prior: of the factor's logarithm, or of the addend."""


PARAMETERS = (
    Parameter("speeds.product_share", "times", 0.1),
    Parameter("speeds.inner_half", "times", 0.5),
    Parameter("speeds.wave_share", "plus", 0.25),
    Parameter("speeds.attention_forward", "times", 0.25),
    Parameter("speeds.attention_backward", "times", 0.25),
    Parameter("speeds.memory_share", "times", 0.2),
    Parameter("speeds.launch_s", "times", 0.5),
    Parameter("links.link_share", "times", 0.3),
    Parameter("links.network_share", "times", 0.4),
    Parameter("links.base_s", "times", 0.7),
    Parameter("links.link_step_s", "times", 0.7),
    Parameter("links.network_step_s", "times", 0.7),
    Parameter("stack.host_s", "times", 0.4),
    Parameter("stack.stalls", "plus", 0.2),
    Parameter("stack.passes", "times", 0.25),
    Parameter("stack.hides_tensor", "plus", 0.25),
    Parameter("stack.hides_gradients", "plus", 0.3),
    Parameter("stack.hides_weights", "plus", 0.3),
    Parameter("stack.hides_sends", "plus", 0.3),
    Parameter("stack.contention", "plus", 0.08),
    Parameter("stack.step_s", "plus", 0.01),
    Parameter("stack.micro_batch_s", "plus", 0.001),
)
SECONDS = "_s"

Change = tuple[str, float]
"""(times or plus, by how much)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What was found for one cluster."""

    changes: dict[str, Change]
    rows: tuple[tuple[str, str], ...]
    """(source, id) of the rows it was fitted to."""
    error_before: float
    """Mean absolute relative error on those rows, zero-shot."""
    error_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Clusters by name (families.cluster_of), and where they stand."""

    clusters: Mapping[str, Fitted] = field(default_factory=dict)
    name: str = "zero-shot"
    date: str = ""

    def saw(self, row: Row) -> bool:
        """Whether a row was fitted to."""
        found = self.clusters.get(cluster_of(row))
        return found is not None and (row.source, row.id) in found.rows

    def applied(self, row: Row, stack: Stack, speeds: Speeds, links: Links) -> tuple[Stack, Speeds, Links]:
        """Software and hardware of a row with what was found for its cluster."""
        found = self.clusters.get(cluster_of(row))
        return changed(stack, speeds, links, found.changes) if found else (stack, speeds, links)

    def save(self, path: Path) -> None:
        """As JSON, for people to read and `load`; written whole or not at all."""
        document = {
            "format": FORMAT,
            "date": self.date,
            "what": "scalars of clusters fitted to published step times: meshwright accuracy --calibration",
            "clusters": {
                name: {
                    "error_before": round(one.error_before, 4),
                    "error_after": round(one.error_after, 4),
                    "changes": {key: {kind: round(value, 6)} for key, (kind, value) in one.changes.items()},
                    "rows": [list(row) for row in one.rows],
                }
                for name, one in self.clusters.items()
            },
        }
        temporary = path.with_name(path.name + ".part")
        temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)


def load(path: Path) -> Calibration:
    """A saved calibration; DataError in one line where the file is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']} is not {FORMAT}")
        clusters = {name: _fitted(entry) for name, entry in document["clusters"].items()}
        return Calibration(clusters=clusters, name=str(path), date=str(document.get("date", "")))
    except OSError as error:
        raise DataError(f"{path} cannot be read as a calibration: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is no calibration ({type(error).__name__}: {error}): make one with benchmarks/leaderboard.py"
        ) from None


def _fitted(entry: Any) -> Fitted:
    known = {parameter.name: parameter for parameter in PARAMETERS}
    changes = {}
    for name, change in entry["changes"].items():
        ((kind, value),) = change.items()
        if name not in known or kind != known[name].kind or not abs(float(value)) < 1e3:
            raise ValueError(f"{name} {kind} {value} is no change of a known scalar")
        changes[name] = (kind, float(value))
    rows = tuple((str(source), str(number)) for source, number in entry["rows"])
    return Fitted(
        changes=changes, rows=rows, error_before=float(entry["error_before"]), error_after=float(entry["error_after"])
    )


def changed(stack: Stack, speeds: Speeds, links: Links, changes: Mapping[str, Change]) -> tuple[Stack, Speeds, Links]:
    """The three with scalars changed."""
    parts: dict[str, Any] = {"stack": stack, "speeds": speeds, "links": links}
    for part, owner in parts.items():
        fields = {}
        for name, (kind, value) in changes.items():
            place, _, key = name.partition(".")
            if place == part and hasattr(owner, key):
                fields[key] = _changed(key, getattr(owner, key), kind, value)
        parts[part] = replace(owner, **fields) if fields else owner
    return parts["stack"], parts["speeds"], parts["links"]


def _changed(key: str, base: float, kind: str, value: float) -> float:
    if kind == "times":
        return base * value
    return max(0.0, base + value) if key.endswith(SECONDS) else min(1.0, max(0.0, base + value))


def fit(rows: Sequence[Row], stands_for: Sequence[float] = ()) -> Fitted:
    """The scalars of the cluster that all `rows` (at most MOST_ROWS) come from; a row weighs what it stands for."""
    if not 1 <= len(rows) <= MOST_ROWS:
        raise ValueError(f"{len(rows)} rows: a calibration has 1 to {MOST_ROWS}")
    parameters = [p for p in PARAMETERS if _has(p, rows[0])]

    def residuals(x: Sequence[float]) -> list[float]:
        changes = _changes(parameters, x)
        return [log(_predicted_s(row, changes) / row.step_s) for row in rows]

    shares = stands_for or [1.0] * len(rows)
    x = minimum(residuals, len(parameters), [share * len(rows) / sum(shares) for share in shares])
    before, after = residuals([0.0] * len(parameters)), residuals(x)
    kept = {
        name: change for (name, change), at in zip(_changes(parameters, x).items(), x, strict=True) if abs(at) > 1e-3
    }
    return Fitted(
        changes=kept,
        rows=tuple((row.source, row.id) for row in rows),
        error_before=sum(abs(exp(r) - 1) for r in before) / len(rows),
        error_after=sum(abs(exp(r) - 1) for r in after) / len(rows),
    )


def _has(parameter: Parameter, row: Row) -> bool:
    place, _, key = parameter.name.partition(".")
    owners: dict[str, Any] = {"stack": Stack, "speeds": Speeds, "links": Links}
    return key in {field.name for field in fields(owners[place])}


def _changes(parameters: Sequence[Parameter], x: Sequence[float]) -> dict[str, Change]:
    return {
        p.name: (p.kind, exp(p.spread * at) if p.kind == "times" else p.spread * at)
        for p, at in zip(parameters, x, strict=True)
    }


def _predicted_s(row: Row, changes: Mapping[str, Change]) -> float:
    plan = row.plan
    stack, speeds, links = changed(
        row.stack, speeds_of(plan.cluster.device, row.stack.flash), links_of(plan.cluster), changes
    )
    estimator = Estimator(
        shape=plan.model, recipe=plan.recipe, cluster=plan.cluster, stack=stack, speeds=speeds, links=links
    )
    return estimator.predict(plan).step_s


def minimum(
    residuals: Callable[[Sequence[float]], list[float]],
    count: int,
    shares: Sequence[float],
    rounds: int = 8,
    trust: float | None = None,
) -> list[float]:
    """x that minimises sum(share huber(r / NOISE)) + sum(x^2) / trust^2: damped Gauss-Newton, finite differences.

    `trust` is how far the priors are believed to reach; None = of TRUSTS what predicts left-out rows best.
    """
    x = [0.0] * count
    found = residuals(x)
    columns = slopes(residuals, x, found)
    if trust is None:
        trust = min(TRUSTS, key=lambda one: left_out(found, columns, shares, one))
    if not trust:
        return x
    pull, damping = 1 / trust**2, 0.1
    for _ in range(rounds):
        before = _cost(found, shares, x, pull)
        for _ in range(5):
            step = newton(found, columns, shares, x, pull, damping)
            tried = [min(3.0, max(-3.0, a - b)) for a, b in zip(x, step, strict=True)]
            there = residuals(tried)
            if _cost(there, shares, tried, pull) < before:
                x, found, damping = tried, there, damping / 5
                break
            damping *= 5
        if before - _cost(found, shares, x, pull) < 1e-2 * before:
            break
        columns = slopes(residuals, x, found)
    return x


def slopes(
    residuals: Callable[[Sequence[float]], list[float]], x: Sequence[float], found: Sequence[float]
) -> list[list[float]]:
    """d residual / d x, a list of rows for each x; the step is large enough to look past the corners of max()."""
    columns = []
    for i, at in enumerate(x):
        step = 0.2 if at <= 0 else -0.2
        moved = residuals([*x[:i], at + step, *x[i + 1 :]])
        columns.append([(b - a) / step for a, b in zip(found, moved, strict=True)])
    return columns


def newton(
    found: Sequence[float], columns: Sequence[Sequence[float]], shares: Sequence[float], x: Sequence[float],
    pull: float, damping: float,
) -> list[float]:  # fmt: skip
    """The step to subtract from x."""
    weights = [share * _weight(r) / NOISE**2 for r, share in zip(found, shares, strict=True)]
    system = [[sum(w * p * q for w, p, q in zip(weights, a, b, strict=True)) for b in columns] for a in columns]
    slope = [sum(w * p * r for w, p, r in zip(weights, a, found, strict=True)) + pull * at
             for a, at in zip(columns, x, strict=True)]  # fmt: skip
    for i, row in enumerate(system):
        row[i] += pull + damping * (pull + row[i])
    return solve(system, slope)


def left_out(
    found: Sequence[float], columns: Sequence[Sequence[float]], shares: Sequence[float], trust: float
) -> float:
    """Mean absolute residual of each row by a fit to the others, the slopes taken as constant."""
    if not trust:
        return sum(share * abs(r) for r, share in zip(found, shares, strict=True))
    total = 0.0
    for gone in range(len(found)):
        others = [r for i, r in enumerate(found) if i != gone]
        weights = [share for i, share in enumerate(shares) if i != gone]
        rest = [[value for i, value in enumerate(column) if i != gone] for column in columns]
        x = [0.0] * len(columns)
        at = others
        for _ in range(3):  # the weights settle
            step = newton(at, rest, weights, x, 1 / trust**2, 0.0)
            x = [a - b for a, b in zip(x, step, strict=True)]
            at = [r + sum(c[i] * v for c, v in zip(rest, x, strict=True)) for i, r in enumerate(others)]
        total += shares[gone] * abs(found[gone] + sum(c[gone] * v for c, v in zip(columns, x, strict=True)))
    return total


def _weight(residual: float) -> float:
    """Huber's: a far-off row pulls no harder than one 2 NOISE away."""
    return 1.0 if abs(residual) <= 2 * NOISE else 2 * NOISE / abs(residual)


def _cost(residuals: Sequence[float], shares: Sequence[float], x: Sequence[float], pull: float) -> float:
    huber = 0.0
    for residual, share in zip(residuals, shares, strict=True):
        size = abs(residual) / NOISE
        huber += share * (size**2 if size <= 2 else 4 * size - 4)
    return huber + pull * sum(value**2 for value in x)


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x with matrix x = right (positive definite), by elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (rows[i][size] - sum(rows[i][j] * x[j] for j in range(i + 1, size))) / rows[i][i]
    return x
