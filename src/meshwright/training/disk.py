"""Room for checkpoints, asked before the first step instead of found out at the first save."""

from pathlib import Path

from meshwright.spec import Plan, parameters
from meshwright.spec.errors import RunError
from meshwright.spec.held import COUNTER_BYTES, WIDTHS, master_bytes
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import ModelShape
from meshwright.spec.units import MIB, gib, many
from meshwright.store import checkpoint_folder
from meshwright.store.durable import free_bytes


def checkpoint_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Of the tensors of one checkpoint, whatever the layout: trained weights, master weights, moments, and a step
    counter for each tensor. Names, hashes and random states, some kilobytes a rank, are left out."""
    storage, precision = recipe.storage, recipe.precision
    each = WIDTHS[precision].parameter + master_bytes(precision, storage)
    trained = (one for one in parameters(shape) if one.trained)
    return sum(one.numel * each + storage.format_of(one).nbytes(one.shape) + COUNTER_BYTES for one in trained)


OTHER_BYTES = 2 * MIB
"""Of what a run leaves beside its checkpoints: plan, tokenizer, metrics, ledgers, picture of the loss."""


def check_space(plan: Plan) -> str | None:
    """RunError where not one more checkpoint has room in the run's file system; a sentence where not all that are kept
    at once have. Nothing is asked of a run that has done all its steps."""
    run, recipe = Path(plan.run), plan.recipe
    there = checkpoint_folder.listing(run / "checkpoints")
    if there and there[-1].step >= recipe.steps:
        return None
    free = free_bytes(run)
    if free is None:
        return None
    size = checkpoint_bytes(plan.model, recipe)
    if free < size + OTHER_BYTES:
        raise RunError(
            f"run={run}: the disk is too small. A checkpoint takes {gib(size)}, other files of the run up to "
            f"{gib(OTHER_BYTES)}, and {gib(free)} are free: free some space, or choose another run="
        )
    best = 1 if plan.data.validation else 0
    saves = -(-recipe.steps // recipe.checkpoint_every) if recipe.checkpoint_every else 1
    most = min(saves, recipe.keep_last + best + 1)
    needed = OTHER_BYTES + most * size - sum(saved.size_bytes for saved in there)
    if free >= needed:
        return None
    return (
        f"the disk of {run} has {gib(free)} free, and up to {many(most, 'checkpoint')} of {gib(size)} are there at "
        f"once (recipe.keep_last={recipe.keep_last}, the best, the one being written): it will be full before the end"
    )
