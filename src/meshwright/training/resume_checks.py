"""What a run refuses to go on from, before anything is computed: each refusal names what would have to be the same."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.data import Corpus
from meshwright.spec import Plan
from meshwright.spec.errors import CheckpointError
from meshwright.spec.recipe import UNREAD, DataRead
from meshwright.store import checkpoint, checkpoint_folder
from meshwright.store.base_weights import base_fingerprint
from meshwright.store.run_folder import RunFolder
from meshwright.training import pretrained
from meshwright.training.reference import holds_weights_only
from meshwright.training.state import DATA_KEYS, STATE_KEYS, TEXT, mixture_weights
from meshwright.training.teacher import check_teacher


def check_resume(plan: Plan, resume: str) -> None:
    """Before anything is prepared: whether what `resume` names is there, and the weights that a new run begins with."""
    if resume == "no":
        RunFolder(path=Path(plan.run), plan=plan).refuse_taken()
    checkpoint_folder.require(resume)
    fresh = resume == "no" or (resume == "auto" and not checkpoint_folder.listing(Path(plan.run) / "checkpoints"))
    if fresh or plan.model.lora is not None:
        pretrained.check_weights(plan)
    check_teacher(plan)


def check_resumed(plan: Plan, corpus: Corpus, found: Path) -> None:
    """CheckpointError where the run cannot go on from there as the plan says: before anything is computed."""
    if holds_weights_only(found):
        if plan.model.lora is not None:
            raise CheckpointError(
                f"{found} holds all weights, and adapters need those of a folder: export the run, and give its "
                "folder as model=DIR"
            )
        return
    values = checkpoint.values(found)
    for what, now in (("sequence", plan.recipe.sequence), ("seed", plan.recipe.seed)):
        if values[what] != now:
            raise _other_place(found, f"recipe.{what}={values[what]}", f"recipe.{what}={now}")
    for key, before in STATE_KEYS.items():
        there, here = values.get(key, before), getattr(plan.recipe, key)
        if there != here:
            raise CheckpointError(
                f"{found} holds optimizer states of recipe.{key}={there}, and the plan has recipe.{key}={here}: "
                f"take recipe.{key}={there}, or start a new run from its export"
            )
    if (there := values.get("weights", [])) != (here := mixture_weights(plan.data)):
        raise _other_place(found, f"weights {_listed(there)} of its sources", f"weights {_listed(here)}")
    for what in DATA_KEYS if plan.data.form == "samples" else ():
        there, here = values.get(what), getattr(plan.data, what)
        if there != here:
            raise _other_place(found, f"data.{what}={there}", f"data.{what}={here}")
    if (there := values.get("malformed", TEXT.malformed)) != (here := plan.data.malformed):
        raise _other_place(found, f"data.malformed={there}", f"data.malformed={here}")
    if values["data"] != corpus.fingerprint:
        samples = ", another template, train_on or thinking" if plan.data.form == "samples" else ""
        raise _other_place(found, f"other text or another split or tokenizer{samples}", f"data={plan.data.title}")
    if values.get("base", "") != base_fingerprint(plan):
        raise CheckpointError(
            f"{found} holds an adapter for other weights than those of model.init={plan.init}: give the "
            "folder that it was trained with, and its model.lora.base"
        )
    scale, lora = values.get("adapter_scale"), plan.model.lora  # an older checkpoint does not say it
    if scale is not None and lora is not None and scale != lora.scale:
        raise CheckpointError(
            f"the adapter's scale would change: {found} was trained with {scale:g}, and "
            f"model.lora.alpha={lora.alpha:g} gives {lora.scale:g}. Keep alpha and rslora of the run, or "
            "start a new run from its export"
        )


def data_read(found: Path | None) -> DataRead:
    """What the run of a checkpoint had read; nothing where there is none, or where it holds weights alone."""
    if found is None or holds_weights_only(found):
        return UNREAD
    values = checkpoint.values(found)
    return DataRead(steps=values["step"], rows=values["cursor"], tokens=values["tokens"])


def _listed(weights: Sequence[float]) -> str:
    return ", ".join(f"{weight:g}" for weight in weights) or "none"


def _other_place(found: Path, there: str, here: str) -> CheckpointError:
    return CheckpointError(
        f"{found}: trained with {there}, the plan says {here}: the place in the data cannot be carried over; "
        "keep what it was trained with, or start a new run from its export"
    )
