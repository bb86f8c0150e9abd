"""`meshwright report RUN [RUN ...]`: one HTML page of runs, for offline."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.inputs.plan_arguments import RunCluster, planner_of


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
    from meshwright.spec.errors import PlanError

    if not 0 <= tolerance < float("inf"):
        raise PlanError(f"--tolerance {tolerance} must be a number of 0 or more, as 0.1 for a tenth")
    target = out or runs[0] / "report.html"
    _writable(target)
    from meshwright.observe.compare.finished_run import open_run
    from meshwright.observe.report.report_page import page
    from meshwright.store.durable import replace_file

    found = [open_run(run) for run in runs]
    planners = [planner_of(run.plan_as_run, cluster) for run in found]
    replace_file(target, page(found, planners, tolerance).encode())
    print(f"{target}: {len(runs)} run{'s' if len(runs) > 1 else ''}; open it in a browser")


def _writable(out: Path) -> None:
    from meshwright.spec.errors import PlanError, RunError

    if out.is_dir():
        raise PlanError(f"--out {out} is a folder: name a file, as --out {out / 'report.html'}")
    if out.suffix not in (".html", ".htm"):
        raise PlanError(f"--out {out}: name a file that ends in .html, as --out {out.with_suffix('.html')}")
    if not out.parent.is_dir():
        if out.name == "report.html":
            raise RunError(f"{out.parent} is no run folder: it does not exist; give the folder that run= named")
        raise PlanError(f"--out {out}: there is no folder {out.parent}; make it first")
