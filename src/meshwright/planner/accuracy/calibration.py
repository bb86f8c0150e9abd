"""Calibration: a few scalars of a cluster, fitted to the measured step times of at most 20 of its rows.

The method is in planner/machine/fitting.py.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import exp, log
from pathlib import Path
from typing import Any

from meshwright.planner.accuracy.published import PublishedRow, cluster_of
from meshwright.planner.cost.exchanges import Links, links_of
from meshwright.planner.cost.speeds import Speeds, speeds_of
from meshwright.planner.cost.stack import Stack
from meshwright.planner.machine.fitting import Adjustment, Scalar, adjusted, changes_at, minimize
from meshwright.planner.step.predict import build_estimator
from meshwright.spec.errors import DataError

MOST_ROWS = 20
"""Rows of a cluster that are fitted to."""
FORMAT = 1


SCALARS = (
    Scalar("speeds.product_share", "times", 0.1),
    Scalar("speeds.inner_half", "times", 0.5),
    Scalar("speeds.wave_share", "plus", 0.25),
    Scalar("speeds.attention_forward", "times", 0.25),
    Scalar("speeds.attention_backward", "times", 0.25),
    Scalar("speeds.memory_share", "times", 0.2),
    Scalar("speeds.launch_s", "times", 0.5),
    Scalar("links.link_share", "times", 0.3),
    Scalar("links.network_share", "times", 0.4),
    Scalar("links.base_s", "times", 0.7),
    Scalar("links.link_step_s", "times", 0.7),
    Scalar("links.network_step_s", "times", 0.7),
    Scalar("stack.host_s", "times", 0.4),
    Scalar("stack.stalls", "plus", 0.2),
    Scalar("stack.passes", "times", 0.25),
    Scalar("stack.hides_tensor", "plus", 0.25),
    Scalar("stack.hides_gradients", "plus", 0.3),
    Scalar("stack.hides_weights", "plus", 0.3),
    Scalar("stack.hides_sends", "plus", 0.3),
    Scalar("stack.contention", "plus", 0.08),
    Scalar("stack.step_s", "plus", 0.01),
    Scalar("stack.micro_batch_s", "plus", 0.001),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFit:
    """The fit of one cluster."""

    changes: dict[str, Adjustment]
    rows: tuple[tuple[str, str], ...]
    """(source, id) of the rows it was fitted to."""
    error_before: float
    """Mean absolute relative error on those rows before the fit, zero-shot."""
    error_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fits of clusters by name (published.cluster_of)."""

    clusters: Mapping[str, ClusterFit] = field(default_factory=dict)
    name: str = "zero-shot"
    date: str = ""

    def was_fitted_to(self, row: PublishedRow) -> bool:
        """Return whether a row was fitted to."""
        cluster_fit = self.clusters.get(cluster_of(row))
        return cluster_fit is not None and (row.source, row.id) in cluster_fit.rows

    def adjust(self, row: PublishedRow, stack: Stack, speeds: Speeds, links: Links) -> tuple[Stack, Speeds, Links]:
        """Adjust the software and hardware of a row by the fit of its cluster."""
        cluster_fit = self.clusters.get(cluster_of(row))
        return adjusted(stack, speeds, links, cluster_fit.changes) if cluster_fit else (stack, speeds, links)

    def save(self, path: Path) -> None:
        """Write JSON for people and `load`. The file is written whole or not at all."""
        document = {
            "format": FORMAT,
            "date": self.date,
            "what": "scalars of clusters fitted to published step times: meshwright accuracy --calibration",
            "clusters": {
                name: {
                    "error_before": round(fitted.error_before, 4),
                    "error_after": round(fitted.error_after, 4),
                    "changes": {key: {kind: round(amount, 6)} for key, (kind, amount) in fitted.changes.items()},
                    "rows": [list(row) for row in fitted.rows],
                }
                for name, fitted in self.clusters.items()
            },
        }
        # Replaced at once: a reader never sees half a calibration.
        temporary = path.with_name(path.name + ".part")
        temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)


def load(path: Path) -> Calibration:
    """Read a saved calibration. Raises DataError, with a message of one line, when the file is none."""
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
            f"{path} is no calibration ({type(error).__name__}: {error}): make one with evaluation/leaderboard.py"
        ) from None


def _fitted(entry: Any) -> ClusterFit:
    known = {scalar.name: scalar for scalar in SCALARS}
    changes = {}
    for name, change in entry["changes"].items():
        ((kind, amount),) = change.items()
        # The file may come from a stranger, and a scalar of 1e9 would pass for a prediction.
        if name not in known or kind != known[name].kind or not abs(float(amount)) < 1e3:
            raise ValueError(f"{name} {kind} {amount} is no change of a known scalar")
        changes[name] = (kind, float(amount))
    rows = tuple((str(source), str(number)) for source, number in entry["rows"])
    return ClusterFit(
        changes=changes, rows=rows, error_before=float(entry["error_before"]), error_after=float(entry["error_after"])
    )


def fit(rows: Sequence[PublishedRow], stands_for: Sequence[float] = ()) -> ClusterFit:
    """Fit the scalars of the cluster that all `rows` come from. A row weighs as many rows as it stands for."""
    if not 1 <= len(rows) <= MOST_ROWS:
        raise ValueError(f"{len(rows)} rows: a calibration has 1 to {MOST_ROWS}")
    scalars = [p for p in SCALARS if _has(p, rows[0])]

    def residuals(x: Sequence[float]) -> list[float]:
        changes = changes_at(scalars, x)
        # Logarithms: half and twice the measured time are equally wrong.
        return [log(_predicted_s(row, changes) / row.step_s) for row in rows]

    shares = stands_for or [1.0] * len(rows)
    x = minimize(residuals, len(scalars), [share * len(rows) / sum(shares) for share in shares])
    before, after = residuals([0.0] * len(scalars)), residuals(x)
    # A scalar that hardly moved is noise of the fit, and would be printed as a finding.
    significant = {
        name: change for (name, change), at in zip(changes_at(scalars, x).items(), x, strict=True) if abs(at) > 1e-3
    }
    return ClusterFit(
        changes=significant,
        rows=tuple((row.source, row.id) for row in rows),
        error_before=sum(abs(exp(r) - 1) for r in before) / len(rows),
        error_after=sum(abs(exp(r) - 1) for r in after) / len(rows),
    )


def _has(scalar: Scalar, row: PublishedRow) -> bool:
    part, _, key = scalar.name.partition(".")
    owners: dict[str, Any] = {"stack": Stack, "speeds": Speeds, "links": Links}
    return key in {field.name for field in fields(owners[part])}


def _predicted_s(row: PublishedRow, changes: Mapping[str, Adjustment]) -> float:
    plan = row.plan
    speeds, links = speeds_of(plan.cluster.device, row.stack.flash), links_of(plan.cluster)
    return build_estimator(plan, *adjusted(row.stack, speeds, links, changes)).predict(plan).step_s
