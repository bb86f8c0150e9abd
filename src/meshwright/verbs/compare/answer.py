"""`compare` and `compare --serve`: planned, dry run and measured of a run or of a served load, row by row."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.interface.answers.answer import Answer, Place, checked, folder_of
from meshwright.interface.answers.markup import line, table, whole
from meshwright.interface.planning.plan_request import check_cluster, planner_of
from meshwright.observe.compare.comparison import ComparedRow, Comparison, DryRunner, columns
from meshwright.observe.compare.comparison import compare as compare_columns
from meshwright.observe.compare.finished_run import DRYRUN, FinishedRun, goodput_document, open_run
from meshwright.observe.compare.table import TITLES, as_json, explanation, percent, row_json, shown, verdict
from meshwright.observe.shared_document import SharedDocument, parse_document
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, OutsideTolerance, RunError
from meshwright.store.durable import replace_file

if TYPE_CHECKING:
    from meshwright.observe.compare.served_load import ServingColumns
    from meshwright.verbs.plan_serve.answer import ServingAnswer


Told = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, repr=False)
class ComparisonAnswer(Answer):
    """The table of a run."""

    run: Path
    comparison: Comparison
    goodput: dict[str, Any] | None = None
    """The account of the run's wall time. None = the run kept none."""

    @property
    def plan(self) -> Plan:
        """The plan as it was run."""
        return self.comparison.plan

    @property
    def agrees(self) -> bool | None:
        """Do all rows that are known twice agree? None = there is no such row."""
        return not self.comparison.disagreeing if self.comparison.judged else None

    @property
    def disagreeing(self) -> tuple[ComparedRow, ...]:
        """Rows beyond their tolerance."""
        return self.comparison.disagreeing

    @property
    def explanation(self) -> tuple[str, ...]:
        """Sentences about the first row that disagrees. Empty = all agree."""
        bad = self.comparison.disagreeing
        return tuple(explanation(self.comparison, bad[0])) if bad else ()

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright compare --json` prints."""
        return {**as_json(self.comparison, str(self.run)), "goodput": self.goodput}

    def check(self) -> None:
        """Raise OutsideTolerance with the first row that disagrees, RunError if nothing could be compared."""
        if not self.comparison.judged:
            planned, dry, measured = self.comparison.columns
            if measured.document is None:
                missing = f"{measured.about}; train the plan, or run meshwright profile"
            else:
                missing = f"{dry.about}; compare without dry_run=False" if dry.document is None else planned.about
            raise RunError(f"{self.run}: nothing could be compared, no figure is known twice: {missing}")
        if self.explanation:
            raise OutsideTolerance(f"{self.run}: {self.explanation[0]}")

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each figure: planned, dryrun and measured, with the errors of the first two."""
        names = ("section", "what", "rank", "unit", "planned", "dryrun", "measured", "planned_error", "dryrun_error",
                 "tolerance", "agrees")  # fmt: skip
        return [{name: row[name] for name in names} for row in self.to_dict()["rows"]]

    def __repr__(self) -> str:
        return f"{self.run}: {' '.join(' '.join(verdict(self.comparison)).split())}"

    def _repr_html_(self) -> str:
        comparison = self.comparison
        rows = [row for row in comparison.rows if row.rank in (None, comparison.rank) and any(row.values)]
        cells = [
            (
                row.what + (" (calls)" if row.unit == "calls" else ""),
                *(shown(value, row.unit) for value in row.values),
                *(percent(row.error(column)) for column in (0, 1)),
                "" if row.agrees() else "disagrees",
            )
            for row in rows
        ]
        verdict = {
            True: f"Agrees: all {len(comparison.judged)} rows that are known twice",
            False: f"Disagrees: {len(comparison.disagreeing)} of {len(comparison.judged)} rows",
            None: "Nothing could be compared: no figure is known twice",
        }[self.agrees]
        return whole(
            line(
                f"{verdict} (tolerance {comparison.tolerance:.0%}, traffic exact)", "good" if self.agrees else "alarm"
            ),
            *map(line, filter(None, (comparison.columns[0].elsewhere, *self.explanation))),
            table((str(self.run), *TITLES, "planned is off", "dry run is off", ""), cells),
            *(line(f"{column.title}: {column.about}") for column in comparison.columns),
        )


@checked
def compare(
    run: Place, *, tolerance: float = 0.1, dry_run: bool = True, cluster: str | None = None, told: Told = warnings.warn
) -> ComparisonAnswer:
    """Compare plan, dry run and measurement of a run: memory by kind, traffic, time, MFU, bubble.

    Rows that disagree raise nothing: see `agrees` and `check`.

    Args:
        run: A run folder, or the answer of `train` or `profile`.
        tolerance: Largest relative error of a row. Traffic must be exact.
        dry_run: Make a dry run if the folder has none, and keep it there.
        cluster: Cluster of the planned column. None = that of the plan.
        told: Called with a sentence if the dry run cannot be kept.

    Raises:
        RunError: The run cannot be compared.
        PlanError: An argument makes no sense.
    """
    check_tolerance(tolerance)
    check_cluster(cluster)
    folder = folder_of(run)
    finished = open_run(folder)
    plan = finished.plan_as_run
    three = columns(finished, planner_of(plan, cluster), _dry_runner(finished, told) if dry_run else None)
    comparison = compare_columns(plan, three, tolerance)
    return ComparisonAnswer(run=folder, comparison=comparison, goodput=goodput_document(finished))


def check_tolerance(tolerance: float) -> None:
    """Raise ArgumentError unless the tolerance is a finite number of 0 or more."""
    if not 0 <= tolerance < float("inf"):
        raise ArgumentError("tolerance", tolerance, "must be a number of 0 or more, as 0.1 for a tenth")


def _dry_runner(run: FinishedRun, told: Told) -> DryRunner:
    """Return a function that makes the dry run and keeps it in the folder, for later comparisons and reports."""

    def dry(plan: Plan, device: str) -> SharedDocument:
        from meshwright.observe.dryrun.document import dry_run_document
        from meshwright.observe.dryrun.simulate import dry_run

        text = json.dumps(dry_run_document(dry_run(plan, device=device)), indent=1)
        try:
            replace_file(run.path / DRYRUN, (text + "\n").encode())
        except OSError as error:  # a read-only folder is compared all the same
            told(f"the dry run is not kept in {run.path}: {error.strerror}")
        # Through the text that is kept, so that a first and a later comparison read the same numbers.
        return parse_document(json.loads(text), "the dry run")

    return dry


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingComparison(Answer):
    """The table of a served load."""

    plan: "ServingAnswer"
    columns: "ServingColumns"
    tolerance: float
    title: str
    """Name of the served model."""

    @property
    def compared(self) -> tuple[ComparedRow, ...]:
        """Rows of memory, then time, then use."""
        return self.columns.rows(self.tolerance)

    @property
    def disagreeing(self) -> tuple[ComparedRow, ...]:
        """Rows beyond the tolerance, in order."""
        return tuple(row for row in self.compared if not row.agrees())

    @property
    def agrees(self) -> bool:
        """Are all rows within the tolerance?"""
        return not self.disagreeing

    def check(self) -> None:
        """Raise OutsideTolerance with the first row that disagrees."""
        if self.disagreeing:
            row = self.disagreeing[0]
            raise OutsideTolerance(
                f"{self.title}: {row.what} planned {shown(row.values[0], row.unit)}, measured "
                f"{shown(row.values[2], row.unit)} ({percent(row.error(0))})"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright compare --serve --json` prints."""
        asked = self.plan.asked
        return {
            "kind": "served load", "model": asked.model.shape.name, "title": self.title,
            "input_length": asked.input_tokens, "output_length": asked.output_tokens,
            "concurrency": asked.concurrency, "tolerance": self.tolerance, "agrees": self.agrees,
            "rows": [row_json(row) for row in self.compared],
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each figure: planned, dryrun and measured, with the errors of the first two."""
        names = ("section", "what", "unit", "planned", "dryrun", "measured", "planned_error", "dryrun_error", "agrees")
        return [{name: row[name] for name in names} for row in self.to_dict()["rows"]]

    def __repr__(self) -> str:
        good = len(self.compared) - len(self.disagreeing)
        return f"{self.title}: {good} of {len(self.compared)} rows agree (tolerance {self.tolerance:.0%})"

    def _repr_html_(self) -> str:
        cells = [
            (row.what, *(shown(value, row.unit) for value in row.values), percent(row.error(0)),
             "" if row.agrees() else "disagrees")
            for row in self.compared
        ]  # fmt: skip
        return whole(line(repr(self), "good" if self.agrees else "alarm"), table(("", *TITLES, "off", ""), cells))


@checked
def compare_serving(
    model: Place, *, cluster: str, input_length: int = 256, output_length: int = 64, concurrency: int = 8,
    waves: int = 4, tolerance: float = 0.1,
) -> ServingComparison:  # fmt: skip
    """Serve a load here with Meshwright's engine, and compare plan, dry run and measurement.

    Rows that disagree raise nothing: see `agrees` and `check`. Raises PlanError for arguments that make no sense.

    Args:
        model: A run folder or a Hugging Face directory, served in fp32.
        cluster: FILE.toml of `calibrate` for this machine, as FILE.tomlx1.
        input_length: Tokens of a prompt.
        output_length: Tokens of an answer.
        concurrency: Requests in flight.
        waves: Requests per slot in flight.
        tolerance: Largest relative error of a row.
    """
    from meshwright.interface.trained.opening import load
    from meshwright.verbs.plan_serve.answer import plan_serving

    check_tolerance(tolerance)
    opened, folder = load(model), folder_of(model)
    asked: Any = opened.plan if opened.plan is not None else Path(folder)
    plan = plan_serving(
        asked, cluster=cluster, input_length=input_length, output_length=output_length, concurrency=concurrency
    )
    columns = plan.measure(waves, opened.model)
    return ServingComparison(plan=plan, columns=columns, tolerance=tolerance, title=str(folder))
