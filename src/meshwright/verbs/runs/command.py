"""`meshwright runs WHERE`: list, verify and prune checkpoints on disk or behind a URL."""

from typing import Annotated

import typer


def runs(
    where: Annotated[
        str, typer.Argument(metavar="WHERE", help="A run or a folder of runs: a path, or a URL as s3://bucket/runs.")
    ] = "runs",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare it with the recorded hashes.")
    ] = False,
    prune: Annotated[
        int | None,
        typer.Option(
            "--prune", metavar="N", help="Remove all but the newest N checkpoints of one run, and its best.", min=1
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the list as one JSON document.")] = False,
) -> None:
    """List the checkpoints of runs: step, held-out loss, size, and whether all files are there.

    Exits with 4 when a checkpoint is incomplete or damaged.
    """
    from meshwright.interface.terminal.screen_text import print_answer
    from meshwright.verbs.runs.answer import runs as list_runs

    answer = list_runs(where, verify=verify, prune=prune)
    print_answer(answer, answer.lines(), json=json)
    if answer.problems:
        raise typer.Exit(4)
