"""Start of every verb that trains: its options, the checks before torch is loaded, and the run with its display."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.interface.process.environment import (
    nodes,
    processes,
    rank,
    refuse_unnumbered,
    unread_accelerate_settings,
)
from meshwright.interface.process.launch import command, joined, launched, stand_by
from meshwright.spec.errors import ArgumentError, IllegalLayout
from meshwright.spec.extras import require
from meshwright.spec.plan.plan import RANDOM, SAMPLES, world_violation

if TYPE_CHECKING:
    from meshwright.spec import Plan
    from meshwright.training.step.watch import Watcher

TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write RUN/tensorboard (needs an extra).")]

WandB = Annotated[bool, typer.Option("--wandb", help="Also report to Weights & Biases (needs an extra).")]

HangAfter = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Abort when a process makes no progress for SECONDS; 0 disables. [default: 300, or 10 times the "
        "longest step]",
        show_default=False,
    ),
]

Anyway = Annotated[bool, typer.Option("--anyway", help="Train even if the dry run says that it does not fit.")]

NoDryRun = Annotated[
    bool,
    typer.Option(
        "--no-dry-run", help="Skip plan and dry run: train at once, and show only measured figures at the end."
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document.")]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a verb that trains."""

    tensorboard: bool
    wandb: bool
    hang_after: float | None
    anyway: bool
    dry_run: bool
    json: bool

    def __post_init__(self) -> None:
        for service, wanted in (("tensorboard", self.tensorboard), ("wandb", self.wandb)):
            if wanted:
                require(service, f"--{service}")
        if self.hang_after is not None and not 0 <= self.hang_after < float("inf"):
            raise ArgumentError("hang_after", self.hang_after, "must be a number of seconds, or 0 for no limit")

    @property
    def words(self) -> list[str]:
        """The options as words of a command line, without defaults."""
        flags = {"--tensorboard": self.tensorboard, "--wandb": self.wandb, "--anyway": self.anyway, "--json": self.json}
        after = [] if self.hang_after is None else ["--hang-after", f"{self.hang_after:g}"]
        return [*(flag for flag, on in flags.items() if on), *after, *([] if self.dry_run else ["--no-dry-run"])]


def start(
    verb: str, words: Sequence[str], plan: "Plan", resume: str, notes: Sequence[str], options: Options,
    spares: range = range(0),
) -> None:  # fmt: skip
    """Train a plan that was read from `words`, with a display. `notes` are printed before, `spares` only wait."""
    from meshwright.data.preparation import check_sources
    from meshwright.store import checkpoint_folder
    from meshwright.store.durable import refuse_unwritable

    hang_after, json, dry_run = options.hang_after, options.json, options.dry_run
    if rank() in spares:
        stand_by()
        return
    # Launchers that start processes without numbering them would train the same run many times.
    refuse_unnumbered(os.environ)
    violation = world_violation(plan, processes(), nodes())
    if violation:
        raise IllegalLayout(violation)
    checkpoint_folder.check_resume(resume)
    if resume == "no":
        checkpoint_folder.refuse_taken(Path(plan.run))
    if rank() == 0:
        refuse_unwritable(Path(plan.run))
    check_sources(plan.data)
    if plan.store.url:
        from meshwright.remote.locations import Location

        # Of a plan file; no request is sent yet, so only a missing library is refused here.
        Location.open(plan.store.url)
    # One rank speaks for all, since every rank has read the same words.
    for note in (*notes, *unread_accelerate_settings(os.environ, plan)) if rank() == 0 else ():
        print(f"meshwright: note: {note}", file=sys.stderr)

    # The plan is checked: now import what takes seconds.
    from meshwright.interface.process.failure import INTERRUPTED
    from meshwright.interface.terminal.screen_text import console, print_json
    from meshwright.verbs.train.answer import run as run_plan
    from meshwright.verbs.train.display import choose
    from meshwright.verbs.train.preflight import memory_summary

    run = partial(run_plan, plan, resume=resume, dry_run=dry_run, anyway=options.anyway, machines=nodes())
    with joined(hang_after, spares) as pulse:
        if rank():
            answer = run(pulse=pulse)
        else:
            services = _services(options.tensorboard, options.wandb)
            with choose(console(json=json), rows=plan.data.form == SAMPLES) as display:
                answer = run(watchers=[display, *services], progress=display.encoding, pulse=pulse)
            # Before the ranks disconnect, which may take long: whoever sent a signal may not wait.
            if json:
                print_json(answer.to_dict())
            elif not answer.done:
                where = f"step {answer.summary.step} of {answer.summary.steps}"
                done = f"Saved after {where}" if answer.summary.checkpoint else "Stopped before the first step"
                print(f"{done}; to continue: {again(verb, [*words, *options.words], str(answer.run))}", flush=True)
            elif dry_run and (memory := memory_summary(answer.run, answer.summary)):
                # What a model was tuned or distilled from is what its reader compares it with.
                source = {"tune": plan.init, "distill": plan.teacher_init}.get(verb, RANDOM)
                name = str(answer.run)
                more = ["compare", name] if source == RANDOM else ["eval", name, "--against", source]
                print(f"{memory}\nmore: {command(more)}", flush=True)
    if answer.summary.stopped == "interrupted":
        raise typer.Exit(INTERRUPTED)


def again(verb: str, words: Sequence[str], run: str) -> str:
    """Return the same command on as many processes, continuing from the newest checkpoint of the run."""
    changes = [word for word in words if not word.startswith(("resume=", "run="))]
    words = [verb, *changes, f"run={run}", "resume=auto"]
    elastic = words[words.index("--elastic") + 1] if "--elastic" in words else ""
    if processes() == 1 and not elastic:
        return command(words)
    host = os.environ.get("MASTER_ADDR", "")
    return launched(words, nodes=nodes(), per_node=processes() // nodes(), host=host, elastic=elastic)


def _services(tensorboard: bool, wandb: bool) -> "list[Watcher]":
    from meshwright.training.step.watch import Forgiving, TensorBoard, WandB

    wanted: list[Watcher] = [*([TensorBoard()] if tensorboard else []), *([WandB()] if wandb else [])]
    return [Forgiving(watcher) for watcher in wanted]
