"""`meshwright report RUN [RUN ...]`: write one offline HTML page of runs."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.interface.options import RunCluster


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, which are overlaid; or a serve --record FILE.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE.html", help="File of the page. [default: report.html of the first RUN]"
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", help="Tolerance of the table, as for compare.")] = 0.1,
    cluster: RunCluster = None,
) -> None:
    """Write a page with loss, throughput, memory, the pipeline's timeline, traffic, the three-column table, the plan.

    It shows what the folders hold: `profile` and `compare` add figures that training alone does not write. Of a record
    of serving it shows requests, blocks and steps.
    """
    from meshwright.interface.terminal.screen_text import shown_path
    from meshwright.verbs.report.answer import report as write_report

    target = write_report(*runs, out=out, tolerance=tolerance, cluster=cluster)
    shown = f"{len(runs)} run{'s' if len(runs) > 1 else ''}" if runs[0].is_dir() else f"the steps of {runs[0]}"
    print(f"{shown_path(target)}: {shown}; open it in a browser")
