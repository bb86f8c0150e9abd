"""`meshwright explore MODEL --cluster NAME`: every layout as one HTML page, for offline. Needs no torch, no GPU."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.inputs.plan_arguments import (
    AskedCluster,
    AskedModel,
    AskedNodes,
    AskedRecipe,
)


def explore(
    model: AskedModel,
    cluster: AskedCluster = None,
    nodes: AskedNodes = None,
    recipe: AskedRecipe = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE.html", help="Where the page goes.")] = Path(
        "explorer.html"
    ),
) -> None:
    """Write a page with sliders for memory, a map of all legal layouts, and the pipeline schedules."""
    from meshwright.api.documents import check_page
    from meshwright.api.plan_request import asked_estimator, asked_plan
    from meshwright.planner.explorer.explorer_page import page
    from meshwright.store.durable import one_line, replace_file

    asked = asked_plan(model, cluster, nodes, recipe or [])
    check_page(out, "explorer.html")
    command = _command(model, cluster, nodes, recipe or [])
    with one_line(out, "--out"):
        replace_file(out, page(asked, asked_estimator(asked, cluster), command).encode())
    print(f"{out}: {asked.model.name} on {asked.cluster.devices} {asked.cluster.device.name}; open it in a browser")


def _command(model: str, cluster: str | None, nodes: int | None, recipe: list[str]) -> str:
    """What asks `plan` about the same; the page adds sequence, batch and layout, and later words count."""
    words = ["meshwright", "plan", model]
    words += ["--cluster", cluster] if cluster else []
    words += ["--nodes", str(nodes)] if nodes else []
    return shlex.join([*words, *(word for one in recipe for word in ("--recipe", one))])
