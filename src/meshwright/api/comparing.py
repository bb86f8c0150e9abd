"""`compare`: planned, dry run and measured of a run, row by row; `report`: one page of runs."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.api.answer import Answer
from meshwright.api.arguments import Place, checked, folder_of
from meshwright.api.documents import check_page
from meshwright.api.markup import line, table, whole
from meshwright.api.plan_request import check_cluster, planner_of
from meshwright.observe.compare.disagreement import TITLES, explanation, shown
from meshwright.observe.compare.finished_run import DRYRUN, FinishedRun, open_run
from meshwright.observe.compare.judge import ComparedRow, Comparison
from meshwright.observe.compare.judge import compare as lay
from meshwright.observe.compare.sources_of_columns import DryRunner, columns
from meshwright.observe.compare.table import as_json, percent, verdict
from meshwright.observe.shared_document import SharedDocument, parse_document
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, OutsideTolerance, PlanError, RunError
from meshwright.store.durable import one_line, replace_file
from meshwright.store.run_folder import RunFolder

Told = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, repr=False)
class ComparisonAnswer(Answer):
    """The table of a run."""

    run: Path
    found: Comparison

    @property
    def plan(self) -> Plan:
        """As it was run."""
        return self.found.plan

    @property
    def agrees(self) -> bool | None:
        """Whether every row that is known twice does; None where none is."""
        return not self.found.disagreeing if self.found.judged else None

    @property
    def disagreeing(self) -> tuple[ComparedRow, ...]:
        """Rows beyond their tolerance."""
        return self.found.disagreeing

    @property
    def explanation(self) -> tuple[str, ...]:
        """Sentences about the first row that disagrees; empty where all agree."""
        bad = self.found.disagreeing
        return tuple(explanation(self.found, bad[0])) if bad else ()

    def to_dict(self) -> dict[str, Any]:
        """The document that `meshwright compare --json` prints."""
        return as_json(self.found, str(self.run))

    def check(self) -> None:
        """OutsideTolerance with the first row that disagrees; RunError where nothing could be compared."""
        if not self.found.judged:
            wanting = _wanting(self.found)
            raise RunError(f"{self.run}: nothing could be compared, no figure is known twice: {wanting}")
        if self.explanation:
            raise OutsideTolerance(f"{self.run}: {self.explanation[0]}")

    def rows(self) -> list[dict[str, Any]]:
        """A row for each figure: planned, dryrun and measured, with the errors of the first two."""
        names = ("section", "what", "rank", "unit", "planned", "dryrun", "measured", "planned_error", "dryrun_error",
                 "tolerance", "agrees")  # fmt: skip
        return [{name: row[name] for name in names} for row in self.to_dict()["rows"]]

    def __repr__(self) -> str:
        return f"{self.run}: {' '.join(' '.join(verdict(self.found)).split())}"

    def _repr_html_(self) -> str:
        found = self.found
        rows = [row for row in found.rows if row.rank in (None, found.rank) and any(row.values)]
        cells = [
            (
                row.what + (" (calls)" if row.unit == "calls" else ""),
                *(shown(value, row.unit) for value in row.values),
                *(percent(row.error(place)) for place in (0, 1)),
                "" if row.agrees() else "disagrees",
            )
            for row in rows
        ]
        verdict = {
            True: f"Agrees: all {len(found.judged)} rows that are known twice",
            False: f"Disagrees: {len(found.disagreeing)} of {len(found.judged)} rows",
            None: "Nothing could be compared: no figure is known twice",
        }[self.agrees]
        return whole(
            line(f"{verdict} (tolerance {found.tolerance:.0%}, traffic exact)", "good" if self.agrees else "alarm"),
            *map(line, filter(None, (found.columns[0].elsewhere, *self.explanation))),
            table((str(self.run), *TITLES, "planned is off", "dry run is off", ""), cells),
            *(line(f"{column.title}: {column.about}") for column in found.columns),
        )


@checked
def compare(
    run: Place,
    *,
    tolerance: float = 0.1,
    dry_run: bool = True,
    cluster: str | None = None,
    told: Told = warnings.warn,
) -> ComparisonAnswer:
    """Lay plan, dry run and measurement of a run side by side: memory by kind, traffic, time, MFU, bubble.

    `run`: a run folder, or the answer of `train` or `profile`. `tolerance`: how far a row may be off, relatively;
    traffic must be exact. `dry_run`: make one where the folder keeps none, and keep it there. `cluster`: what the
    planned column is of; the plan's own by default. `told` where the dry run cannot be kept. RunError, PlanError; that
    rows disagree is an answer (`agrees`, `check`).
    """
    check_tolerance(tolerance)
    check_cluster(cluster)
    folder = folder_of(run)
    finished = open_run(folder)
    plan = finished.plan_as_run
    three = columns(finished, planner_of(plan, cluster), _dryer(finished, told) if dry_run else None)
    return ComparisonAnswer(run=folder, found=lay(plan, three, tolerance))


@checked
def report(*runs: Place, out: str | Path | None = None, tolerance: float = 0.1, cluster: str | None = None) -> Path:
    """Write one HTML page of runs, for offline; gives its path. `out`: where, RUN/report.html of the first by
    default."""
    check_tolerance(tolerance)
    check_cluster(cluster)
    if not runs:
        raise PlanError("report needs a run folder at least")
    folders = [folder_of(run) for run in runs]
    target = Path(out) if out is not None else folders[0] / "report.html"
    if out is not None:
        check_page(target, "report.html")
    for folder in folders:
        RunFolder.open(folder)
    if out is None:
        check_page(target, "report.html")
    from meshwright.observe.report.report_page import page  # loads torch

    found = [open_run(folder) for folder in folders]
    planners = [planner_of(run.plan_as_run, cluster) for run in found]
    with one_line(target, "out="):
        replace_file(target, page(found, planners, tolerance).encode())
    return target


def check_tolerance(tolerance: float) -> None:
    """ArgumentError where it is none."""
    if not 0 <= tolerance < float("inf"):
        raise ArgumentError(f"tolerance={tolerance} must be a number of 0 or more, as 0.1 for a tenth")


def _wanting(found: Comparison) -> str:
    """What would make a second column."""
    planned, dry, measured = found.columns
    if measured.document is None:
        return f"{measured.about}; train the plan, or run meshwright profile"
    return f"{dry.about}; compare without dry_run=False" if dry.document is None else planned.about


def _dryer(run: FinishedRun, told: Told) -> DryRunner:
    """Runs the dry run, and keeps it in the folder for the next question and for the report."""

    def dry(plan: Plan, device: str) -> SharedDocument:
        from meshwright.observe.dryrun.dryrun_document import dry_run_document as as_document
        from meshwright.observe.dryrun.simulate import dry_run

        text = json.dumps(as_document(dry_run(plan, device=device)), indent=1)
        try:
            replace_file(run.path / DRYRUN, (text + "\n").encode())
        except OSError as error:  # a folder that may only be read is compared all the same
            told(f"the dry run is not kept in {run.path}: {error.strerror}")
        return parse_document(json.loads(text), "the dry run")

    return dry
