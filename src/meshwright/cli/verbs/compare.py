"""`meshwright compare RUN`: planned, dry run and measured, row by row, of a run that has ended."""

import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.inputs.plan_arguments import RunCluster, planner_of

if TYPE_CHECKING:
    from meshwright.observe.compare.finished_run import Finished
    from meshwright.observe.compare.judge import Comparison
    from meshwright.observe.compare.sources_of_columns import DryRunner
    from meshwright.observe.shared_document import Document
    from meshwright.spec import Plan


def compare(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder: of train, quickstart or profile.")],
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance", metavar="SHARE", help="How far a row may be off, relatively; traffic must be exact."
        ),
    ] = 0.1,
    dryrun: Annotated[
        bool,
        typer.Option("--dry-run/--no-dry-run", help="Make the dry run where the folder keeps none, and keep it there."),
    ] = True,
    cluster: RunCluster = None,
    every: Annotated[bool, typer.Option("--all", help="Every row of every rank, also those that are equal.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the table as one JSON document.")] = False,
) -> None:
    """Compare plan, dry run and measurement of a run: memory by kind, traffic, time, MFU, bubble.

    What is not known is left open, with the reason. Exit code 4 where a row differs by more than the tolerance; the
    first one is explained.
    """
    from meshwright.spec.errors import OutsideTolerance, PlanError, RunError

    if not 0 <= tolerance < float("inf"):
        raise PlanError(f"--tolerance {tolerance} must be a number of 0 or more, as 0.1 for a tenth")
    from meshwright.cli.terminal.compare_answer import answer
    from meshwright.cli.terminal.output import print_json
    from meshwright.cli.terminal.screen_text import show
    from meshwright.observe.compare.disagreement import explanation
    from meshwright.observe.compare.finished_run import open_run
    from meshwright.observe.compare.judge import compare as lay
    from meshwright.observe.compare.sources_of_columns import columns
    from meshwright.observe.compare.table import as_json

    finished = open_run(run)
    plan = finished.plan_as_run
    three = columns(finished, planner_of(plan, cluster), _dryer(finished) if dryrun else None)
    found = lay(plan, three, tolerance)
    if json:
        print_json(as_json(found, str(run)))
    else:
        show(answer(found, str(run), every=every))
    if not found.judged:
        raise RunError(f"{run}: nothing could be compared, no figure is known twice: {_wanting(found)}")
    bad = found.disagreeing
    if bad:
        raise OutsideTolerance(f"{run}: {explanation(found, bad[0])[0]}")


def _wanting(found: "Comparison") -> str:
    """What would make a second column."""
    planned, dry, measured = found.columns
    if measured.found is None:
        return f"{measured.about}; train the plan, or run meshwright profile"
    return f"{dry.about}; compare without --no-dry-run" if dry.found is None else planned.about


def _dryer(run: "Finished") -> "DryRunner":
    """Runs the dry run, and keeps it in the folder for the next question and for the report."""

    def dry(plan: "Plan", device: str) -> "Document":
        from meshwright.cli.terminal.output import console
        from meshwright.observe.compare.finished_run import DRYRUN
        from meshwright.observe.dryrun.dryrun_document import dry as as_document
        from meshwright.observe.dryrun.simulate import dry_run
        from meshwright.observe.shared_document import checked
        from meshwright.store.durable import replace_file

        with console(json=True).status("dry run"):
            found = as_document(dry_run(plan, device=device))
        text = json_text.dumps(found, indent=1)
        try:
            replace_file(run.path / DRYRUN, (text + "\n").encode())
        except OSError as error:  # a folder that may only be read is compared all the same
            print(f"the dry run is not kept in {run.path}: {error.strerror}", file=sys.stderr)
        return checked(json_text.loads(text), "the dry run")

    return dry
