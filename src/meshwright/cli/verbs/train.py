"""`meshwright train [PLAN.yaml] [KEY=VALUE ...]`: trains, watched."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.inputs.plan_words import Words, shape_from_folder, sort_words

if TYPE_CHECKING:
    from meshwright.train.watch import Watcher


def train(
    words: Words = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write RUN/tensorboard (extra).")] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="Also report to Weights & Biases (extra).")] = False,
    hang_after: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="On several processes: how long one may stand still in a step. 0 = for ever. "
            "[default: 300, or 10 times the longest step]",
            show_default=False,
        ),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Train even where the dry run says that it does not fit.")
    ] = False,
    foresight: Annotated[
        bool,
        typer.Option(
            "--dry-run/--no-dry-run",
            help="Plan and dry run before the first step, and beside the measured after the last.",
        ),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")] = False,
) -> None:
    """Train a plan; without a file, the default plan.

    Any key can be given on the command line: model=llama-tiny data=./texts recipe.steps=500 run=runs/a.
    resume=auto goes on from the newest checkpoint of the run folder if there is one, resume=PATH from that one. Without
    run= the folder is a new one, runs/DATE-MODEL, and with resume=auto that of the newest run of this plan.
    model=HF_DIR takes the weights too, model.init=random draws new ones.
    """
    from meshwright import planfile
    from meshwright.cli.process.determinism import set_environment
    from meshwright.cli.process.launch import joined, nodes, processes, rank
    from meshwright.spec.errors import IllegalLayout, PlanError
    from meshwright.spec.worlds import world_violation

    path, overrides, resume = sort_words(words or ())
    notes: list[str] = []
    plan = planfile.read(path, overrides, shape_from_folder=shape_from_folder, notes=notes, processes=processes())
    violation = world_violation(plan, processes(), nodes())
    if violation:
        raise IllegalLayout(violation)
    if hang_after is not None and not 0 <= hang_after < float("inf"):
        raise PlanError(f"--hang-after {hang_after} must be a number of seconds, or 0 for no limit")
    for note in notes if rank() == 0 else ():
        print(f"meshwright: note: {note}", file=sys.stderr)

    set_environment(plan)

    # Only now, when nothing in the plan can be wrong any more, what costs seconds to import.
    from meshwright.cli.process.failure import INTERRUPTED
    from meshwright.cli.process.invocation import command
    from meshwright.cli.terminal.display import Chosen, choose
    from meshwright.cli.terminal.output import console, print_json
    from meshwright.cli.verbs.foresight import foresee, hindsight
    from meshwright.train import loop

    look_ahead = partial(foresee, anyway=anyway, machines=nodes()) if foresight else None
    with joined(hang_after) as pulse:
        if rank():
            summary = loop.run(plan, resume=resume, pulse=pulse, foresee=look_ahead, machines=nodes())
        else:
            services, chosen = _services(tensorboard, wandb), Chosen(plan.run)
            with choose(console(json=json)) as display:
                summary = loop.run(
                    plan,
                    watchers=[chosen, display, *services],
                    resume=resume,
                    progress=display.encoding,
                    pulse=pulse,
                    foresee=look_ahead,
                    machines=nodes(),
                )
            # Before the ranks part, which may take long: whoever sent the signal may not wait for it.
            if json:
                print_json({"run": chosen.run, **asdict(summary)})
            elif summary.stopped != "done":
                print(f"to resume: {again(words or (), chosen.run)}", flush=True)
            elif look_ahead is not None and (said := hindsight(Path(chosen.run), summary)):
                print(f"{said}\nmore: {command(['compare', chosen.run])}", flush=True)
    if summary.stopped == "interrupted":
        raise typer.Exit(INTERRUPTED)


def again(words: Sequence[str], run: str) -> str:
    """The same command on as many processes, going on from the newest checkpoint of the run in this folder."""
    from meshwright.cli.process.invocation import command, launched
    from meshwright.cli.process.launch import nodes, processes

    given = [word for word in words if not word.startswith(("resume=", "run="))]
    words = ["train", *given, f"run={run}", "resume=auto"]
    if processes() == 1:
        return command(words)
    return launched(words, nodes=nodes(), per_node=processes() // nodes(), host=os.environ.get("MASTER_ADDR", ""))


def _services(tensorboard: bool, wandb: bool) -> "list[Watcher]":
    from meshwright.train.watchers import Forgiving, TensorBoard, WandB

    wanted: list[Watcher] = [*([TensorBoard()] if tensorboard else []), *([WandB()] if wandb else [])]
    return [Forgiving(watcher) for watcher in wanted]
