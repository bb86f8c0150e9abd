"""`meshwright plan MODEL --serve`: memory, concurrency and speed of a served model."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshwright.spec.errors import ArgumentError, DoesNotFit, argument


def print_serving(
    model: str, cluster: str | None, nodes: int | None, layout: Sequence[str] | None,
    load: Mapping[str, str | int | None], training: Mapping[str, object],
    *, details: bool, top: int | None, json: bool, measure: bool = False,
) -> None:  # fmt: skip
    """Plan a served load and print it; with `measure`, also run it on this machine, with random weights.

    `load`: options of the load, empty or None = not given. `training`: options of plans of training, which are refused.
    """
    from meshwright.interface.terminal.screen_text import print_json, show
    from meshwright.spec.layout.cluster import names_file
    from meshwright.verbs.plan_serve.answer import plan_serving
    from meshwright.verbs.plan_serve.screen import serving_answer

    key = next((name for name, setting in training.items() if setting), None)
    if key:
        raise ArgumentError(
            key, rule=f"is for training, and {argument('serve', True)} plans serving", remedy="leave one out"
        )
    if not load["adapters"] and (load["adapter_rank"] or load["adapter_targets"]):
        targets, number = argument("adapter_targets"), argument("adapters", "N")
        raise ArgumentError("adapter_rank", rule=f"and {targets} describe adapters", remedy=f"add {number}")
    asked: dict[str, Any] = {name: setting for name, setting in load.items() if setting not in ("", None)}
    if measure and not (cluster and names_file(cluster)):
        raise ArgumentError(
            "measure",
            True,
            "runs the load on this machine",
            f"name it with {argument('cluster', 'FILE.toml')} of calibrate",
        )
    try:
        answer = plan_serving(model, cluster=cluster, nodes=nodes, tp=_tp(layout), **asked)
    except DoesNotFit as error:
        if json and error.document:
            print_json(error.document)
        raise
    columns = answer.measure() if measure else None
    if json:
        measured = {"measured": asdict(columns), "errors": columns.errors} if columns else {}
        print_json(answer.to_dict() | measured)
        return
    show(serving_answer(answer, details=details, top=top))
    if columns:
        from meshwright.interface.terminal.compared_rows import served_rows

        show(["", *served_rows(columns.rows(tolerance=float("inf")))])


def _tp(layout: Sequence[str] | None) -> int:
    """Return the tensor-parallel degree that --layout fixes, 0 = none."""
    words = [word for part in layout or () for word in part.replace(",", " ").split()]
    if not words:
        return 0
    key, _, degree = words[0].partition("=")
    if len(words) > 1 or key != "tp" or not degree.isdecimal() or not int(degree):
        raise ArgumentError(
            "layout",
            " ".join(words),
            remedy=f"with {argument('serve', True)} a layout is tp=N alone",
        )
    return int(degree)
