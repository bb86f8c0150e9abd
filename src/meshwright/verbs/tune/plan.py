"""The plan of `tune`: that of `train`, with the defaults of fine-tuning. Reading it imports no torch."""

from collections.abc import Sequence
from typing import Any

from meshwright.data.preparation import holds_pairs
from meshwright.data.sequences.numbered_rows import check_objective
from meshwright.interface.planning.plan_reading import (
    OBJECTIVE_RATES,
    PREFERENCE_DEFAULTS,
    REPLACED_BY,
    SAMPLES_WORD,
    SHARDED_DEFAULTS,
    TUNING_DEFAULTS,
    defaults_of,
    plan_of,
    rate_of_adapters,
    read_plan,
)
from meshwright.planfile.keys import overridden_keys
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError, argument
from meshwright.spec.plan.plan import RANDOM

SPLITS = frozenset(("dp_replicate", "dp_shard", "zero", "tp", "sp", "cp", "pp", "vp", "ep", "schedule"))
"""Keys of layout that say how ranks share the work."""


def tuning_plan(words: Sequence[Any], *, processes: int | None = 1, notes: list[str] | None = None) -> tuple[Plan, str]:
    """Return (plan, resume), as read_plan, with the defaults of fine-tuning. `notes` takes those that were used."""
    typed = [str(word) for word in words if plan_of(word) is None]
    is_whole_plan = len(typed) < len(words) or any("=" not in word for word in typed)
    keys = {key for word in typed if "=" in word and not word.startswith("resume=") for key in overridden_keys(word)}
    # A micro-batch or recomputation says nothing about ranks, so they still share the batch by themselves.
    splits_ranks = any(key == "layout" or key.removeprefix("layout.") in SPLITS for key in keys)
    is_laid_out = (processes or 1) == 1 or splits_ranks
    shared = {} if is_laid_out else SHARDED_DEFAULTS
    added = {} if is_whole_plan else {**defaults_of(TUNING_DEFAULTS, keys), **shared}

    def read(notes: list[str] | None) -> tuple[Plan, str]:
        more = [f"{key}={value}" for key, value in added.items()]
        return read_plan([*words, *more, SAMPLES_WORD], {}, processes=processes, notes=notes)

    # The data, the adapters and the positions of the plan decide on further defaults: read it, then read it again.
    plan, resume = read(notes)
    if plan.init == RANDOM and "model.init" not in keys and (not is_whole_plan or (plan.model.lora and resume == "no")):
        raise PlanError(
            f"tune needs a model: give its Hugging Face folder as {argument('model', 'DIR')} (`meshwright "
            "export` writes one from a run). For random weights give model.init=random"
        )
    if plan.recipe.epochs == 0 and "recipe.epochs" in keys and not keys & set(REPLACED_BY["recipe.epochs"]):
        raise PlanError("recipe.epochs=0 reads nothing: give a number of epochs, recipe.steps or recipe.tokens")
    if any(word == "data.form=text" for word in typed):
        raise PlanError("data.form=text has no answers to tune on: take meshwright train, which trains on all text")
    pairs = holds_pairs(plan.data)
    if not is_whole_plan and pairs:
        added = {**defaults_of(PREFERENCE_DEFAULTS, keys), **shared}
        if "recipe.learning_rate" in added:
            added["recipe.learning_rate"] = OBJECTIVE_RATES.get(plan.recipe.objective, added["recipe.learning_rate"])
        plan, resume = read([])
    if plan.model.lora is not None and "recipe.learning_rate" in added:
        added["recipe.learning_rate"] = rate_of_adapters(added["recipe.learning_rate"])
        plan, resume = read([])
    limit = plan.model.max_positions
    if "recipe.sequence" in added and limit < plan.recipe.sequence:
        added["recipe.sequence"] = str(limit)
        plan, resume = read([])
    check_objective(plan.data, plan.recipe, pairs)
    if notes is not None and added:
        notes.append("tuning defaults: " + " ".join(f"{key}={value}" for key, value in added.items()))
    return plan, resume
