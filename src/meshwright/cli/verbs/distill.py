"""`meshwright distill --teacher DIR --student MODEL [KEY=VALUE ...]`: train a student on a teacher's distributions."""

from typing import Annotated

import typer

from meshwright.cli.inputs.plan_arguments import Words
from meshwright.cli.process.launch import processes
from meshwright.cli.verbs.train import (
    Anyway,
    AsJson,
    Foresight,
    HangAfter,
    Options,
    TensorBoard,
    WandB,
    start,
)


def distill(
    words: Words = None,
    teacher: Annotated[
        str, typer.Option("--teacher", metavar="DIR", help="A Hugging Face folder, or a run.", show_default=False)
    ] = "",
    student: Annotated[
        str,
        typer.Option(
            "--student", metavar="MODEL", show_default=False,
            help="A preset, a Hugging Face folder, or teacher:layers=N for so many layers of the teacher.",
        ),
    ] = "",
    tensorboard: TensorBoard = False,
    wandb: WandB = False,
    hang_after: HangAfter = None,
    anyway: Anyway = False,
    foresight: Foresight = True,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Train a student on the distributions of a teacher: --teacher runs/base --student teacher:layers=2.

    The teacher runs beside the student, under the same layout; recipe.distillation_top_k=64 asks it once before, and
    keeps what it said on disk. recipe.distillation_beta, distillation_temperature and distillation_hard say which loss.
    All else is as for train.
    """
    from meshwright.api.distilling import distillation_plan, distillation_words

    notes: list[str] = []
    plan, resume = distillation_plan(words or (), teacher, student, processes=processes(), notes=notes)
    options = Options(tensorboard, wandb, hang_after, anyway, foresight, json)
    again = [*(word for word in distillation_words(words or (), teacher, student)), *(words or ())]
    start("distill", again, plan, resume, notes, options)
