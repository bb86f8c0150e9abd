"""`meshwright explore MODEL --cluster NAME`: every layout as one HTML page, for offline. Needs no torch, no GPU."""

import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.asked import asked_estimator, asked_plan


def explore(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PLAN.yaml", help="A preset, a Hugging Face folder or config.json, or a plan file."
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE.toml",
            help="Device and how many of it a node has: h100x8; or what calibrate wrote.",
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Nodes of the cluster.")] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", metavar="KEY=VALUE,...", help="sequence=8192,global_batch=1024,precision=bf16 ..."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="Where the page goes.")] = Path(
        "explorer.html"
    ),
) -> None:
    """Write a page with sliders for memory, a map of all legal layouts, and the pipeline schedules."""
    from meshwright.planner.explore import page

    asked = asked_plan(model, cluster, nodes, recipe or [])
    _writable(out)
    _write(page(asked, asked_estimator(asked, cluster)), out)
    print(f"{out}: {asked.model.name} on {asked.cluster.devices} {asked.cluster.device.name}; open it in a browser")


def _writable(out: Path) -> None:
    """Said before the layouts are counted, not after."""
    from meshwright.spec.errors import PlanError

    if out.is_dir():
        raise PlanError(f"--out {out} is a folder: name a file, as --out {out / 'explorer.html'}")
    if not out.parent.is_dir():
        raise PlanError(f"--out {out}: there is no folder {out.parent}; make it first")


def _write(text: str, out: Path) -> None:
    """Whole or not at all."""
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(out)
    finally:
        fresh.unlink(missing_ok=True)
