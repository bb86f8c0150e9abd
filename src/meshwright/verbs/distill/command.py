"""`meshwright distill --teacher DIR --student MODEL [KEY=VALUE ...]`: train a student on a teacher's distributions."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.interface.options import Words
from meshwright.interface.process.environment import processes
from meshwright.spec.errors import PlanError
from meshwright.verbs.train.start import Anyway, AsJson, HangAfter, NoDryRun, Options, TensorBoard, WandB, start


def distill(
    words: Words = None,
    teacher: Annotated[
        str, typer.Option(metavar="DIR", help="A Hugging Face folder, or a run.", show_default=False)
    ] = "",
    student: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            show_default=False,
            help="A preset, a Hugging Face folder, or teacher:layers=N for N layers of the teacher.",
        ),
    ] = "",
    sequences: Annotated[
        Path | None, typer.Option(metavar="OUT.jsonl", help="Write a file of the teacher's answers, for tune.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --sequences: file with rows of prompts.")
    ] = None,
    beams: Annotated[int, typer.Option(help="Search for the likeliest answer; 1 = no search.")] = 1,
    temperature: Annotated[float, typer.Option(help="Of sampled answers; 0 = greedy.")] = 0.0,
    samples: Annotated[int, typer.Option(help="Sampled answers per prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Leave out answers longer than this.")] = 256,
    keep_cut: Annotated[
        bool, typer.Option("--keep-cut", help="Keep answers that are longer, up to there: no end is trained.")
    ] = False,
    tensorboard: TensorBoard = False,
    wandb: WandB = False,
    hang_after: HangAfter = None,
    anyway: Anyway = False,
    no_dry_run: NoDryRun = False,
    json: AsJson = False,
) -> None:
    """Train a student on the distributions of a teacher: --teacher runs/base --student teacher:layers=2.

    The teacher runs along with the student, under the same layout. With recipe.distillation_top_k=64 it is asked once,
    before training, and its predictions are kept on disk. recipe.distillation_beta, distillation_temperature and
    distillation_hard choose the loss. All else is as for train.
    """
    from meshwright.compress.distill_sequences import AnswerSearch, questions
    from meshwright.interface.answers.answer import check_new_file
    from meshwright.store.run_folder import check_model
    from meshwright.verbs.distill.answer import distillation_plan, write_answers

    # A file of answers is another job, which trains nothing.
    if sequences is not None:
        if prompts is None or not teacher or words or student:
            raise PlanError(
                "--sequences writes a teacher's answers and trains nothing: give --teacher DIR --prompts FILE, "
                "without --student and keys of a plan"
            )
        AnswerSearch(beams=beams, temperature=temperature, samples=samples, max_new_tokens=max_new_tokens)
        check_model(Path(teacher))
        check_new_file(sequences, "sequences")
        questions(prompts)
        written = write_answers(
            teacher, prompts, sequences, beams=beams, temperature=temperature, samples=samples,
            max_new_tokens=max_new_tokens, keep_cut=keep_cut,
        )  # fmt: skip
        cut = f"; {written.cut:,} of them stop at {max_new_tokens} tokens, and teach no end" if written.cut else ""
        why = "are empty" if keep_cut else "did not end, or are empty,"
        left_out = f"; {written.left_out:,} that {why} are left out" if written.left_out else ""
        print(f"{sequences}: {written.written:,} answers of {teacher}{cut}{left_out}")
        return
    for name, asked, default in (
        ("prompts", prompts, None), ("beams", beams, 1), ("temperature", temperature, 0.0), ("samples", samples, 1),
        ("max-new-tokens", max_new_tokens, 256), ("keep-cut", keep_cut, False),
    ):  # fmt: skip
        if asked != default:
            raise PlanError(f"--{name} is for a teacher's answers: add --sequences OUT.jsonl, or leave it out")
    options = Options(tensorboard, wandb, hang_after, anyway, not no_dry_run, json)
    notes: list[str] = []
    plan, resume = distillation_plan(words or (), teacher, student, processes=processes(), notes=notes)
    model_options = [*(["--teacher", teacher] if teacher else []), *(["--student", student] if student else [])]
    start("distill", [*model_options, *(words or ())], plan, resume, notes, options)
