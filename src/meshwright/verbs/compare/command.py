"""`meshwright compare RUN`: planned, dry run and measured of a finished run, row by row."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from meshwright.interface.options import RunCluster, ServedConcurrency, ServedInput, ServedOutput, refuse_load
from meshwright.spec.errors import ArgumentError, argument


def compare(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of train, quickstart or profile.")],
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", help="Largest relative error of a row; traffic must be exact.")
    ] = 0.1,
    dryrun: Annotated[
        bool, typer.Option("--dry-run/--no-dry-run", help="Make the dry run if the folder has none, and keep it there.")
    ] = True,
    cluster: RunCluster = None,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve", help="Serve a load here, and compare it with its plan for --cluster FILE.toml of calibrate."
        ),
    ] = False,
    input_length: ServedInput = None,
    output_length: ServedOutput = None,
    concurrency: ServedConcurrency = None,
    every: Annotated[bool, typer.Option("--all", help="Print every row of every rank, also equal ones.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the table as one JSON document.")] = False,
) -> None:
    """Compare plan, dry run and measurement of a run: memory by kind, traffic, time, MFU, bubble.

    Unknown figures are left open, with the reason. Exit code 4 where a row differs by more than the tolerance; the
    first such row is explained.
    """
    load = {"input_length": input_length, "output_length": output_length, "concurrency": concurrency}
    if serve:
        _compare_serving(
            run, cluster, {name: number for name, number in load.items() if number is not None}, tolerance, json=json
        )
        return
    refuse_load(load)
    from meshwright.interface.terminal.screen_text import console, print_answer
    from meshwright.verbs.compare.answer import compare as compare_columns
    from meshwright.verbs.compare.screen import answer as in_words

    with console(json=True).status("compare"):
        answer = compare_columns(
            run, tolerance=tolerance, dry_run=dryrun, cluster=cluster, told=lambda line: print(line, file=sys.stderr)
        )
    print_answer(answer, in_words(answer.comparison, str(run), every=every, goodput=answer.goodput), json=json)
    answer.check()


def _compare_serving(run: Path, cluster: str | None, load: Mapping[str, int], tolerance: float, *, json: bool) -> None:
    from meshwright.interface.terminal.screen_text import console, print_answer
    from meshwright.verbs.compare.answer import compare_serving
    from meshwright.verbs.compare.screen import served_load

    if cluster is None:
        raise ArgumentError(
            "serve",
            True,
            "compares with a plan for this machine",
            f"give {argument('cluster', 'FILE.toml')} of calibrate",
        )
    with console(json=True).status("compare"):
        answer = compare_serving(run, cluster=cluster, tolerance=tolerance, **load)
    print_answer(answer, served_load(answer), json=json)
    answer.check()
