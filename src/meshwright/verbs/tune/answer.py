"""`tune`: fine-tune a model in this process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.interface.answers.answer import HasPlan, checked
from meshwright.interface.planning.plan_reading import words_of
from meshwright.spec import Plan
from meshwright.training.step.watch import Watcher
from meshwright.verbs.train.answer import TrainAnswer, run_alone
from meshwright.verbs.tune.plan import tuning_plan


@checked
def tune(
    *plan: str | Path | Plan | HasPlan,
    resume: str = "no",
    dry_run: bool = True,
    anyway: bool = False,
    watchers: Sequence[Watcher] | None = None,
    **keys: Any,
) -> TrainAnswer:
    """Fine-tune a model in this process: model="hf_folder", data="chat.jsonl".

    The data are conversations, or pairs of a better and a worse answer. Without a plan file, the defaults
    of fine-tuning (`meshwright.interface.planning.plan_reading`) apply wherever nothing else is given, and weights
    come from a Hugging Face folder. Arguments and errors are those of `train`.
    """
    parsed, word = tuning_plan([*plan, *(word for key, value in keys.items() for word in words_of(key, value))])
    return run_alone(parsed, resume if word == "no" else word, dry_run=dry_run, anyway=anyway, watchers=watchers)
