"""`meshwright train [PLAN.yaml] [KEY=VALUE ...]`: train a plan, with a display."""

from typing import Annotated

import typer

from meshwright.interface.options import Words
from meshwright.interface.process.environment import processes
from meshwright.verbs.train.start import Anyway, AsJson, HangAfter, NoDryRun, Options, TensorBoard, WandB, start


def train(
    words: Words = None,
    tensorboard: TensorBoard = False,
    wandb: WandB = False,
    hang_after: HangAfter = None,
    elastic: Annotated[
        str,
        typer.Option(
            metavar="MIN:MAX", help="Under torchrun --nnodes MIN:MAX: choose another layout for fewer nodes.",
            show_default=False,
        ),
    ] = "",
    anyway: Anyway = False,
    no_dry_run: NoDryRun = False,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Train a plan; without a file, the default plan.

    Any key can be given on the command line: model=llama-tiny data=./texts recipe.steps=500 run=runs/a. resume=auto
    continues from the newest checkpoint of the run folder, if there is one, and resume=PATH from that checkpoint.
    Without run= the folder is a new one, runs/DATE-MODEL; with resume=auto it is that of the newest run of this plan.
    model=HF_DIR also takes the weights, and model.init=random draws new ones.
    """
    from meshwright.interface.planning.plan_reading import read_plan

    options = Options(tensorboard, wandb, hang_after, anyway, not no_dry_run, json)
    notes: list[str] = []
    spares = range(0)
    again = [*(words or ()), *(["--elastic", elastic] if elastic else [])]
    if elastic:
        from meshwright.verbs.train.elastic import read_elastic_plan

        plan, resume, spares = read_elastic_plan(words or (), elastic, notes)
    else:
        plan, resume = read_plan(words or (), {}, processes=processes(), notes=notes)
    start("train", again, plan, resume, notes, options, spares)
