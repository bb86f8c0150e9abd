"""`compare --serve`: planned, dry run and measured of a served load, row by row."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.interface.answers.answer import Answer, Place, checked, folder_of
from meshwright.interface.answers.markup import line, table, whole
from meshwright.observe.compare.comparison import ComparedRow
from meshwright.observe.compare.served_load import ServingColumns
from meshwright.observe.compare.table import TITLES, percent, row_json, shown
from meshwright.spec.errors import OutsideTolerance
from meshwright.verbs.compare.answer import check_tolerance
from meshwright.verbs.plan_serve.answer import ServingAnswer, plan_serving


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingComparison(Answer):
    """The table of a served load."""

    plan: ServingAnswer
    columns: ServingColumns
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

    check_tolerance(tolerance)
    opened, folder = load(model), folder_of(model)
    asked: Any = opened.plan if opened.plan is not None else Path(folder)
    plan = plan_serving(
        asked, cluster=cluster, input_length=input_length, output_length=output_length, concurrency=concurrency
    )
    columns = plan.measure(waves, opened.model)
    return ServingComparison(plan=plan, columns=columns, tolerance=tolerance, title=str(folder))
