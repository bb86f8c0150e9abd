"""`meshwright plan MODEL --serve`: memory, concurrency and speed of a served model."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.spec.errors import ArgumentError, DoesNotFit, PlanError


def print_serving(
    model: str, cluster: str | None, nodes: int | None, layout: Sequence[str] | None,
    load: Mapping[str, str | int | None], training: Mapping[str, object],
    *, details: bool, top: int | None, json: bool, measure: bool = False,
) -> None:  # fmt: skip
    """Plan a served load and print it; with `measure`, also run it on this machine, with random weights.

    `load`: options of the load, empty or None = not given. `training`: options of plans of training, which are refused.
    """
    from meshwright.api.serve_planning import plan_serving
    from meshwright.cli.terminal.output import print_json
    from meshwright.cli.terminal.screen_text import show
    from meshwright.cli.terminal.serving_answer import served_rows, serving_answer
    from meshwright.planner.machine.clusterfile import is_file

    misplaced = next((name for name, setting in training.items() if setting), None)
    if misplaced:
        raise ArgumentError(f"--{misplaced} is for training, and --serve plans serving: leave one out")
    if not load["adapters"] and (load["adapter_rank"] or load["adapter_targets"]):
        raise ArgumentError("--adapter-rank and --adapter-targets describe adapters: add --adapters N")
    asked: dict[str, Any] = {name: setting for name, setting in load.items() if setting not in ("", None)}
    if measure and not (cluster and is_file(cluster)):
        raise ArgumentError("--measure runs the load on this machine: name it with --cluster FILE.toml of calibrate")
    try:
        answer = plan_serving(model, cluster=cluster, nodes=nodes, tp=_tp(layout), **asked)
    except DoesNotFit as error:
        if json and error.document:
            print_json(error.document)
        raise
    comparison = None
    if measure:
        from meshwright.api.serving_comparison import ServingComparison

        title = answer.asked.model.shape.name
        comparison = ServingComparison(plan=answer, columns=answer.measure(), tolerance=float("inf"), title=title)
    if json:
        more: dict[str, Any] = {}
        if comparison:
            more = {"measured": asdict(comparison.columns), "errors": comparison.columns.errors}
        print_json(answer.to_dict() | more)
        return
    show(serving_answer(answer, details=details, top=top))
    if comparison:
        show(["", *served_rows(comparison.compared)])


def refuse_load(load: Mapping[str, str | int | None]) -> None:
    """Raise PlanError for options of a load without --serve."""
    option = next((name for name, setting in load.items() if setting not in ("", None)), None)
    if option:
        raise PlanError(f"--{option.replace('_', '-')} is for serving: add --serve")


def _tp(layout: Sequence[str] | None) -> int:
    """Return the tensor-parallel degree that --layout fixes, 0 = none."""
    words = [word for part in layout or () for word in part.replace(",", " ").split()]
    if not words:
        return 0
    key, _, degree = words[0].partition("=")
    if len(words) > 1 or key != "tp" or not degree.isdecimal() or not int(degree):
        raise ArgumentError(f"--layout {' '.join(words)!r}: with --serve a layout is tp=N alone")
    return int(degree)
