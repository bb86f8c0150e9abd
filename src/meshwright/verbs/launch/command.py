"""`meshwright launch PLAN.yaml --to NAME`: files that start a plan on a cluster, again and again until it is done."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.interface.options import Words


def launch(
    words: Words = None,
    to: Annotated[
        str, typer.Option("--to", metavar="NAME", help="slurm, kubernetes (JobSet) or skypilot.", show_default=False)
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FOLDER", help="Folder to make, new or empty. [default: the name of --to]",
            show_default=False,
        ),
    ] = None,
    grace: Annotated[
        int | None,
        typer.Option(
            metavar="SECONDS", help="Time to finish a step and save before the machines are taken. [default: counted]",
            show_default=False,
        ),
    ] = None,
    image: Annotated[
        str, typer.Option(metavar="NAME", help="Container image with Meshwright, for kubernetes and skypilot.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print what was written as one JSON document.")] = False,
) -> None:  # fmt: skip
    """Write the files that start a plan on a cluster. They resume a run that is not done, and give up one that fails.

    Nodes and devices are those of the plan: cluster=h100x8 cluster.nodes=4. Nothing is started.
    """
    from meshwright.interface.terminal.screen_text import print_answer, width, wrapped
    from meshwright.verbs.launch.answer import launch as write

    answer = write(*(words or ()), to=to, out=out, grace=grace, image=image)
    print_answer(answer, (line for text in answer.sentences() for line in wrapped(text, width())), json=json)
