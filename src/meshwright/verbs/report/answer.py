"""`report`: one offline page of runs."""

from pathlib import Path

from meshwright.interface.answers.answer import Place, check_page, checked, folder_of, write_page
from meshwright.interface.planning.plan_request import check_cluster, planner_of
from meshwright.observe.compare.finished_run import open_run
from meshwright.spec.errors import PlanError
from meshwright.store.run_folder import RunFolder
from meshwright.verbs.compare.answer import check_tolerance


@checked
def report(*runs: Place, out: str | Path | None = None, tolerance: float = 0.1, cluster: str | None = None) -> Path:
    """Write one offline HTML page of runs and return its path. `out`: None = RUN/report.html of the first run."""
    check_tolerance(tolerance)
    check_cluster(cluster)
    if not runs:
        raise PlanError("report needs at least one run folder")
    folders = [folder_of(run) for run in runs]
    target = Path(out) if out is not None else folders[0] / "report.html"
    if out is not None:
        check_page(target, "report.html")
    for folder in folders:
        RunFolder.open(folder)
    if out is None:
        check_page(target, "report.html")
    from meshwright.verbs.report.page import page  # loads torch

    finished = [open_run(folder) for folder in folders]
    planners = [planner_of(run.plan_as_run, cluster) for run in finished]
    write_page(target, page(finished, planners, tolerance), "out")
    return target
