"""`meshwright plan MODEL --serve`: what serving a model takes and gives, printed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshwright.spec.errors import ArgumentError, DoesNotFit, PlanError

if TYPE_CHECKING:
    from meshwright.api.serve_planning import ServingAnswer
    from meshwright.api.serving_comparison import ServingComparison


def print_serving(
    model: str, cluster: str | None, nodes: int | None, layout: Sequence[str] | None,
    load: Mapping[str, str | int | None], training: Mapping[str, object],
    *, details: bool, top: int | None, json: bool, measure: bool = False,
) -> None:  # fmt: skip
    """Plan and print. `load`: options of the load, empty or None where not given; `training`: options that only a plan
    of training has, which are refused."""
    from meshwright.api.serve_planning import plan_serving
    from meshwright.cli.terminal.output import print_json
    from meshwright.cli.terminal.screen_text import show
    from meshwright.cli.terminal.serving_answer import served_rows, serving_answer
    from meshwright.planner.machine.clusterfile import is_file

    given = next((name for name, value in training.items() if value), None)
    if given:
        raise ArgumentError(f"--{given} is for training, and --serve plans serving: leave one out")
    if not load["adapters"] and (load["adapter_rank"] or load["adapter_targets"]):
        raise ArgumentError("--adapter-rank and --adapter-targets say how adapters are: add --adapters N")
    asked: dict[str, Any] = {name: value for name, value in load.items() if value not in ("", None)}
    if measure and not (cluster and is_file(cluster)):
        raise ArgumentError("--measure runs the load on this machine: name it with --cluster FILE.toml of calibrate")
    try:
        answer = plan_serving(model, cluster=cluster, nodes=nodes, tp=_tp(layout), **asked)
    except DoesNotFit as error:
        if json and error.document:
            print_json(error.document)
        raise
    found = _measured(answer) if measure else None
    if json:
        more = {"measured": asdict(found.columns), "errors": found.columns.errors} if found else {}
        print_json(answer.to_dict() | more)
        return
    show(serving_answer(answer, details=details, top=top))
    if found:
        show(["", *served_rows(found.compared)])


def _measured(answer: "ServingAnswer") -> "ServingComparison":
    """The load run here, with weights of chance."""
    from meshwright.api.serving_comparison import ServingComparison

    columns = answer.measure()
    return ServingComparison(plan=answer, columns=columns, tolerance=float("inf"), title=answer.asked.model.shape.name)


def refuse_load(load: Mapping[str, str | int | None]) -> None:
    """PlanError where a load is given, and serving was not asked for."""
    given = next((name for name, value in load.items() if value not in ("", None)), None)
    if given:
        raise PlanError(f"--{given.replace('_', '-')} is for serving: add --serve")


def _tp(layout: Sequence[str] | None) -> int:
    """The one degree that a layout of serving fixes; 0 = none."""
    words = [word for part in layout or () for word in part.replace(",", " ").split()]
    if not words:
        return 0
    key, _, value = words[0].partition("=")
    if len(words) > 1 or key != "tp" or not value.isdecimal() or not int(value):
        raise ArgumentError(f"--layout {' '.join(words)!r}: with --serve a layout is tp=N alone")
    return int(value)
