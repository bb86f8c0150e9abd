"""`tune`: `train` with the defaults of fine-tuning, which are said."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.api.arguments import HasPlan, checked
from meshwright.api.plan_reading import words_of
from meshwright.api.training_run import Lines, TrainAnswer, run
from meshwright.api.tuning_plan import tuning_plan
from meshwright.spec import Plan
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.worlds import world_violation
from meshwright.training.watch import Watcher


@checked
def tune(
    *plan: str | Path | Plan | HasPlan,
    resume: str = "no",
    dry_run: bool = True,
    anyway: bool = False,
    watchers: Sequence[Watcher] | None = None,
    **keys: Any,
) -> TrainAnswer:
    """Fine-tune a model on conversations, or on pairs of a better and a worse answer, in this process:
    model="hf_folder", data="chat.jsonl".

    Arguments are those of train. Without a plan file `DEFAULTS`, or `PREFERENCE_DEFAULTS`, stand where nothing else is
    said, and weights come from a Hugging Face folder. PlanError, DataError, RunError, DoesNotFit.
    """
    asked, also = tuning_plan([*plan, *(word for key, value in keys.items() for word in words_of(key, value))])
    violation = world_violation(asked, 1)
    if violation:
        raise IllegalLayout(violation)
    seen = (Lines(),) if watchers is None else watchers
    return run(asked, resume=resume if also == "no" else also, dry_run=dry_run, anyway=anyway, watchers=seen)
