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
    from meshwright.api.plan_request import asked_estimator, asked_plan
    from meshwright.planner.explorer.explorer_page import page
    from meshwright.store.durable import replace_file

    asked = asked_plan(model, cluster, nodes, recipe or [])
    _writable(out)
    command = _command(model, cluster, nodes, recipe or [])
    replace_file(out, page(asked, asked_estimator(asked, cluster), command).encode())
    print(f"{out}: {asked.model.name} on {asked.cluster.devices} {asked.cluster.device.name}; open it in a browser")


def _command(model: str, cluster: str | None, nodes: int | None, recipe: list[str]) -> str:
    """What asks `plan` about the same; the page adds sequence, batch and layout, and later words count."""
    words = ["meshwright", "plan", model]
    words += ["--cluster", cluster] if cluster else []
    words += ["--nodes", str(nodes)] if nodes else []
    return shlex.join([*words, *(word for one in recipe for word in ("--recipe", one))])


def _writable(out: Path) -> None:
    """Said before the layouts are counted, not after."""
    from meshwright.spec.errors import PlanError

    if out.is_dir():
        raise PlanError(f"--out {out} is a folder: name a file, as --out {out / 'explorer.html'}")
    if out.suffix not in (".html", ".htm"):
        raise PlanError(f"--out {out}: name a file that ends in .html, as --out {out.with_suffix('.html')}")
    if not out.parent.is_dir():
        raise PlanError(f"--out {out}: there is no folder {out.parent}; make it first")
