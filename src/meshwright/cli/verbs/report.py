"""`meshwright report RUN [RUN ...]`: one HTML page of runs, for offline."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.inputs.plan_arguments import RunCluster


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are overlaid.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE.html", help="Where the page goes. [default: RUN/report.html, of the first]"
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", help="Of the table, as for compare.")] = 0.1,
    cluster: RunCluster = None,
) -> None:
    """Write a page with loss, throughput, memory, the pipeline's timeline, traffic, the three-column table, the plan.

    It is made from what the folders hold: `profile` and `compare` leave more for it there than training alone does.
    """
    from meshwright.api import comparing

    target = comparing.report(*runs, out=out, tolerance=tolerance, cluster=cluster)
    print(f"{target}: {len(runs)} run{'s' if len(runs) > 1 else ''}; open it in a browser")
