"""`meshwright tune model=DIR data=FILE [KEY=VALUE ...]`: train with the defaults of fine-tuning."""

from typing import Annotated

import typer

from meshwright.interface.options import Words
from meshwright.interface.process.environment import processes
from meshwright.verbs.train.start import Anyway, AsJson, HangAfter, NoDryRun, Options, TensorBoard, WandB, start


def tune(
    words: Words = None,
    from_trl: Annotated[
        str,
        typer.Option(
            metavar="FLAGS",
            show_default=False,
            help="Flags of TRL's sft or dpo script, in quotes. They are read as keys, which are printed.",
        ),
    ] = "",
    tensorboard: TensorBoard = False,
    wandb: WandB = False,
    hang_after: HangAfter = None,
    anyway: Anyway = False,
    no_dry_run: NoDryRun = False,
    json: AsJson = False,
) -> None:
    """Fine-tune a model on conversations, or on preferences: model=HF_DIR data=chat.jsonl.

    Rows of .jsonl, .json and .parquet files are read by their columns: messages, prompt and completion, text, alpaca
    and sharegpt columns, input_ids. Answers are trained (data.train_on), prompts are not: `meshwright data show` with
    the same words and data.form=samples shows which. Columns chosen and rejected are compared, by DPO or by
    recipe.objective. data.malformed=skip leaves out rows that cannot be read, and counts them. All else is as for
    train, with other defaults, which are printed before the start.
    """
    from meshwright.verbs.tune.plan import tuning_plan

    options = Options(tensorboard, wandb, hang_after, anyway, not no_dry_run, json)
    notes: list[str] = []
    words = list(words or ())
    if from_trl:
        from meshwright.verbs.tune.trl_flags import plan_words

        read = plan_words(from_trl, processes())
        notes.append(f"read from TRL's flags: {' '.join(read)}")
        # Words of the command line come last, since the last one of a key counts.
        words = [*read, *words]
    plan, resume = tuning_plan(words, processes=processes(), notes=notes)
    start("tune", words, plan, resume, notes, options)
