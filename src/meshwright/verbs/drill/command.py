"""`meshwright drill [PLAN.yaml] [KEY=VALUE ...]`: break a short run in many ways, and see it go on."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.interface.options import Words


def drill(
    words: Words = None,
    only: Annotated[
        str, typer.Option(metavar="NAMES", help="Faults to try, with commas. [default: all]", show_default=False)
    ] = "",
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FOLDER", help="Folder for the runs, new or empty.")
    ] = Path("drill"),
    start: Annotated[
        str,
        typer.Option(
            metavar="COMMAND", help="What starts a process per rank, before -m. [default: torchrun, on this machine]",
            show_default=False,
        ),
    ] = "",
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 60,
    json: Annotated[bool, typer.Option("--json", help="Print the outcomes as one JSON document.")] = False,
) -> None:  # fmt: skip
    """Train a plan for some steps, once without a fault and once with each, and compare the losses.

    A rank is killed, frozen, stuck, slow; a loss is NaN; a disk is full; a checkpoint is damaged; the launcher
    dies; the store fails. Each run must go on by itself. Without a plan a small one trains on two ranks here. Exits
    with 4 when a fault is not survived.
    """
    from meshwright.interface.terminal.screen_text import print_answer, width, wrapped
    from meshwright.verbs.drill.answer import drill as run_drill

    names = [name for name in only.split(",") if name]
    answer = run_drill(*(words or ()), only=names, out=out, start=start, steps=steps)
    print_answer(answer, (line for text in answer.lines() for line in wrapped(text, width())), json=json)
    if answer.problems:
        raise typer.Exit(4)
