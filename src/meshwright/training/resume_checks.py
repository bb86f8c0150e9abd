"""Refusals to resume, before anything is computed. Each one names what would have to be the same."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.data import Corpus
from meshwright.spec import Plan
from meshwright.spec.errors import CheckpointError
from meshwright.spec.recipe.recipe import UNREAD, DataRead
from meshwright.store import checkpoint, checkpoint_folder
from meshwright.store.model_weights import base_fingerprint
from meshwright.store.run_folder import RunFolder
from meshwright.training.objectives.reference import holds_weights_only
from meshwright.training.resume import pretrained
from meshwright.training.resume.state import DATA_KEYS, STATE_KEYS, TEXT, mixture_weights
from meshwright.training.teachers.teacher import check_teacher


def check_resume(plan: Plan, resume: str) -> None:
    """Check, before anything is prepared, that the checkpoint to resume from and the first weights exist."""
    if resume == "no":
        RunFolder(path=Path(plan.run), plan=plan).refuse_taken()
    checkpoint_folder.check_resume(resume)
    fresh = resume == "no" or (
        resume == "auto" and not checkpoint_folder.list_checkpoints(Path(plan.run) / "checkpoints")
    )
    if fresh or plan.model.lora is not None:
        pretrained.check_weights(plan)
    check_teacher(plan)


def check_resumed(plan: Plan, corpus: Corpus, checkpoint_path: Path) -> None:
    """Raise CheckpointError unless the run can resume from the checkpoint as the plan says."""
    if holds_weights_only(checkpoint_path):
        if plan.model.lora is not None:
            raise CheckpointError(
                f"{checkpoint_path} holds all weights, and adapters need those of a folder: export the run, and give "
                "its folder as model=DIR"
            )
        return
    values = checkpoint.read_values(checkpoint_path)
    for what, planned in (("sequence", plan.recipe.sequence), ("seed", plan.recipe.seed)):
        if values[what] != planned:
            raise _position_lost(checkpoint_path, f"recipe.{what}={values[what]}", f"recipe.{what}={planned}")
    for key, default in STATE_KEYS.items():
        saved, planned = values.get(key, default), getattr(plan.recipe, key)
        if saved != planned:
            raise CheckpointError(
                f"{checkpoint_path} holds optimizer states of recipe.{key}={saved}, and the plan has "
                f"recipe.{key}={planned}: take recipe.{key}={saved}, or start a new run from its export"
            )
    saved_weights, planned_weights = values.get("weights", []), mixture_weights(plan.data)
    if saved_weights != planned_weights:
        raise _position_lost(
            checkpoint_path, f"weights {_listed(saved_weights)} of its sources", f"weights {_listed(planned_weights)}"
        )
    for what in DATA_KEYS if plan.data.form == "samples" else ():
        saved, planned = values.get(what), getattr(plan.data, what)
        if saved != planned:
            raise _position_lost(checkpoint_path, f"data.{what}={saved}", f"data.{what}={planned}")
    saved_handling, planned_handling = values.get("malformed", TEXT.malformed), plan.data.malformed
    if saved_handling != planned_handling:
        raise _position_lost(checkpoint_path, f"data.malformed={saved_handling}", f"data.malformed={planned_handling}")
    if values["data"] != corpus.fingerprint:
        samples = ", another template, train_on or thinking" if plan.data.form == "samples" else ""
        raise _position_lost(
            checkpoint_path, f"other text or another split or tokenizer{samples}", f"data={plan.data.title}"
        )
    if values.get("base", "") != base_fingerprint(plan):
        raise CheckpointError(
            f"{checkpoint_path} holds an adapter for other weights than those of model.init={plan.init}: give the "
            "folder that it was trained with, and its model.lora.base"
        )
    scale, lora = values.get("adapter_scale"), plan.model.lora  # an older checkpoint does not say it
    if scale is not None and lora is not None and scale != lora.scale:
        raise CheckpointError(
            f"the adapter's scale would change: {checkpoint_path} was trained with {scale:g}, and "
            f"model.lora.alpha={lora.alpha:g} gives {lora.scale:g}. Keep alpha and rslora of the run, or "
            "start a new run from its export"
        )


def data_read(checkpoint_path: Path | None) -> DataRead:
    """Return what the run of a checkpoint had read: nothing without a checkpoint, or with an imported one."""
    if checkpoint_path is None or holds_weights_only(checkpoint_path):
        return UNREAD
    values = checkpoint.read_values(checkpoint_path)
    return DataRead(steps=values["step"], rows=values["cursor"], tokens=values["tokens"])


def _listed(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:g}" for weight in weights) or "none"


def _position_lost(checkpoint_path: Path, saved: str, planned: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint_path}: trained with {saved}, the plan says {planned}: the place in the data cannot be carried "
        "over; keep what it was trained with, or start a new run from its export"
    )
