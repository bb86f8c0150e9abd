"""`meshwright calibrate`: this machine measured for the planner, as a cluster file."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.toml", help="Where the file goes; without it to the screen.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few sizes in seconds, no training steps: to try it.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document.")] = False,
) -> None:
    """Measure this machine in about a minute: products, memory, attention, exchanges, real steps of small plans; write
    a cluster file for `meshwright plan MODEL --cluster FILE.toml`. Measure while nothing else runs."""
    from meshwright.cli.launch import processes
    from meshwright.spec.errors import PlanError

    if processes() > 1:
        raise PlanError("calibrate starts its processes itself: run it without torchrun")
    if out is not None and (out.suffix != ".toml" or out.is_dir()):
        raise PlanError(f"--out {out}: name a file that ends in .toml, as --out {out.with_suffix('.toml')}")
    if out is not None and not out.parent.is_dir():
        raise PlanError(f"--out {out}: there is no folder {out.parent}; make it first")
    from meshwright.observe.calibrate import calibrate as measure
    from meshwright.planner.clusterwriting import text, write

    found = measure(quick=quick, say=lambda line: print(line, file=sys.stderr, flush=True))
    if out is not None:
        write(found, out)
    if json:
        import tomllib

        from meshwright.cli.output import print_json

        print_json(tomllib.loads(text(found)))
    elif out is None:
        print(text(found), end="")
    else:
        print(f"{out}: {found.device.name}; meshwright plan MODEL --cluster {out}x{found.devices_per_node} reads it")
