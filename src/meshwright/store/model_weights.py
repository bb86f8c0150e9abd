"""Model weights from a run's checkpoint, without the optimizer."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwright.model.low_rank import merged
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, CheckpointError
from meshwright.spec.weights.inventory import adapter_parts
from meshwright.store import checkpoint as checkpoints
from meshwright.store import checkpoint_folder
from meshwright.store.base_weights import base_fingerprint, base_weights
from meshwright.store.model_place import BEST, LAST, check_checkpoint
from meshwright.store.run_folder import RunFolder

MASTER = "optimizer.master."
"""Prefix of the fp32 master weights in checkpoints of runs with lower precision."""


def locate(source: Path, which: str = LAST) -> tuple[RunFolder, Path]:
    """Return the run and the verified checkpoint that `source` names.

    `source` is a checkpoint, or a run folder of which `which` chooses one: last, best, or the number of a step. Raises
    ArgumentError, CheckpointError.
    """
    if checkpoint_folder.is_one(source) and not (source / "plan.yaml").is_file():
        if which != LAST:
            raise ArgumentError(
                f"checkpoint={which}: {source} is a checkpoint already; give the run folder, or leave it"
            )
        return RunFolder.open(source.resolve().parent.parent), checkpoints.named(source)
    run = RunFolder.open(source)
    if which != LAST:
        return run, checkpoints.named(_chosen(run, which))
    newest = checkpoints.newest_whole(checkpoint_folder.newest_first(run.checkpoints))
    if newest is None:
        raise CheckpointError(f"{source} holds no complete checkpoint yet: train it first, or go on with resume=auto")
    return run, newest


def final_weights(plan: Plan, checkpoint: Path, wanted: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) of a verified checkpoint, with an adapter merged into its base weights.

    Merging is in fp32, one tensor at a time; quantized base weights are restored first. Raises HubError, PlanError or
    CheckpointError when the base weights are missing or have changed.
    """
    if plan.model.lora is None:
        yield from weights(checkpoint, wanted, verified=True)
        return
    if checkpoints.values(checkpoint).get("base") != base_fingerprint(plan):
        raise CheckpointError(
            f"{checkpoint} holds an adapter for other weights than {plan.init} has now: restore those that "
            "model.init named when it was trained"
        )
    # Adapters are small, so all are in memory while the base weights stream by.
    adapters = dict(weights(checkpoint, torch.float32, verified=True))
    lora, trained = plan.model.lora, next(tensor.dtype for _, tensor in weights(checkpoint, torch.bfloat16))
    for name, stored in base_weights(plan, trained):
        tensor = stored if isinstance(stored, Tensor) else stored.restored(trained)
        low = adapter_parts(name, adapters)
        dtype = torch.float32 if name.endswith("correction_bias") else wanted  # routers stay in fp32 in all formats
        yield name, (merged(tensor.float(), low, lora) if low else tensor).to(dtype)


def _chosen(run: RunFolder, which: str) -> Path:
    """Return the path of the best checkpoint, or of the one of a step."""
    listing = checkpoint_folder.listing(run.checkpoints)
    if which == BEST:
        best = checkpoints.best(run.checkpoints)
        if best is None:
            raise CheckpointError(
                f"checkpoint=best: no checkpoint of {run.path} has a held-out loss: take checkpoint=last. For the "
                "next run set data.validation, and save checkpoints at evaluations"
            )
        return best
    check_checkpoint(which)
    path = next((saved.path for saved in listing if saved.step == int(which)), None)
    if path is None:
        steps = ", ".join(str(saved.step) for saved in listing) or "none"
        raise CheckpointError(f"checkpoint={which}: {run.path} has no checkpoint of that step, it has: {steps}")
    return path


def weights(checkpoint: Path, wanted: torch.dtype, *, verified: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) of a checkpoint, layer after layer. With `wanted` fp32, master weights where they exist.

    All files are verified before the first weight unless `verified` is set, as after `locate`.
    """
    kinds = checkpoints.names(checkpoint)
    chosen = {name: name.removeprefix("model.") for name in kinds if name.startswith("model.")}
    if wanted == torch.float32:
        masters = {name.removeprefix(MASTER): name for name in kinds if name.startswith(MASTER)}
        chosen = {masters.get(plain, name): plain for name, plain in chosen.items()}
    # Layer order keeps together the parts from which an exporter builds one tensor.
    ordered = sorted(chosen, key=lambda name: _by_layer(chosen[name]))
    for name, tensor in checkpoints.stream(checkpoint, ordered, verified=verified):
        yield chosen[name], tensor


def _by_layer(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
