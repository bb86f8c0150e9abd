"""`report`: one offline page of runs."""

from pathlib import Path

from meshwright.interface.answers.answer import Place, check_page, checked, folder_of, write_page
from meshwright.interface.planning.plan_request import check_cluster, planner_of
from meshwright.observe.compare.finished_run import open_run
from meshwright.serving.engine.serving_record import is_record, read_record
from meshwright.spec.errors import PlanError
from meshwright.store.run_folder import RunFolder
from meshwright.verbs.compare.answer import check_tolerance


@checked
def report(*runs: Place, out: str | Path | None = None, tolerance: float = 0.1, cluster: str | None = None) -> Path:
    """Write one offline HTML page of runs, or of a record of `serve --record`, and return its path.

    `out`: None = RUN/report.html of the first run, or the record's name with .html.
    """
    check_tolerance(tolerance)
    check_cluster(cluster)
    if not runs:
        raise PlanError("report needs at least one run folder, or a record of serve --record")
    records = [run for run in map(folder_of, runs) if is_record(run)]
    if records:
        return _report_record(records[0], len(runs), out)
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


def _report_record(record: Path, named: int, out: str | Path | None) -> Path:
    """Write the page of one record of serving."""
    if named > 1:
        raise PlanError("a record of serving has a page of its own: name one record, and no run in addition")
    target = Path(out) if out is not None else record.with_suffix(".html")
    check_page(target, "report.html")
    from meshwright.verbs.report.serving_page import page

    write_page(target, page(read_record(record), record.name), "out")
    return target
