"""The weights of a trained model as a run's checkpoint holds them, without its optimizer."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwright.model.low_rank import merged
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, CheckpointError
from meshwright.spec.inventory import adapter_parts
from meshwright.store import checkpoint as checkpoints
from meshwright.store import checkpoint_folder
from meshwright.store.base_weights import base_fingerprint, base_weights
from meshwright.store.model_place import BEST, LAST, check_checkpoint
from meshwright.store.run_folder import RunFolder

MASTER = "optimizer.master."
"""Where a checkpoint of a run below fp32 keeps its weights in full."""


def locate(source: Path, which: str = LAST) -> tuple[RunFolder, Path]:
    """The run and the checkpoint that `source` means, verified: one of its checkpoints, or a run folder and `which` of
    them: last, best, or the number of a step. ArgumentError, CheckpointError."""
    if checkpoint_folder.is_one(source) and not (source / "plan.yaml").is_file():
        if which != LAST:
            raise ArgumentError(
                f"checkpoint={which}: {source} is a checkpoint already; give the run folder, or leave it"
            )
        return RunFolder.open(source.resolve().parent.parent), checkpoints.named(source)
    run = RunFolder.open(source)
    if which != LAST:
        return run, checkpoints.named(_chosen(run, which))
    found = checkpoints.newest_whole(checkpoint_folder.newest_first(run.checkpoints))
    if found is None:
        raise CheckpointError(f"{source} holds no complete checkpoint yet: train it first, or go on with resume=auto")
    return run, found


def final_weights(plan: Plan, checkpoint: Path, wanted: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The same of a run of this plan, of a checkpoint that was verified. An adapter is added to the weights beside
    which it was trained (of codes what products restored), in fp32, a tensor at a time. HubError or PlanError where
    those are not there any more, or are others."""
    if plan.model.lora is None:
        yield from weights(checkpoint, wanted, verified=True)
        return
    if checkpoints.values(checkpoint).get("base") != base_fingerprint(plan):
        raise CheckpointError(
            f"{checkpoint} holds an adapter of other weights than {plan.init} has now: put those back that model.init "
            "named when it was trained"
        )
    adapters = dict(weights(checkpoint, torch.float32, verified=True))
    lora, trained = plan.model.lora, next(tensor.dtype for _, tensor in weights(checkpoint, torch.bfloat16))
    for name, stored in base_weights(plan, trained):
        tensor = stored if isinstance(stored, Tensor) else stored.restored(trained)
        low = adapter_parts(name, adapters)
        kept = torch.float32 if name.endswith("correction_bias") else wanted  # as everywhere
        yield name, (merged(tensor.float(), low, lora) if low else tensor).to(kept)


def _chosen(run: RunFolder, which: str) -> Path:
    """The best one, or that of a step."""
    there = checkpoint_folder.listing(run.checkpoints)
    if which == BEST:
        found = checkpoints.best(run.checkpoints)
        if found is None:
            raise CheckpointError(
                f"checkpoint=best: no checkpoint of {run.path} has a held-out loss, so that none is the best: take "
                "checkpoint=last, or train with data.validation and checkpoints at evaluations"
            )
        return found
    check_checkpoint(which)
    one = next((saved.path for saved in there if saved.step == int(which)), None)
    if one is None:
        steps = ", ".join(str(saved.step) for saved in there) or "none"
        raise CheckpointError(f"checkpoint={which}: {run.path} has no checkpoint of that step, it has: {steps}")
    return one


def weights(checkpoint: Path, wanted: torch.dtype, *, verified: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint by name, layer after layer, a few at a time; for fp32 the master weights, where there
    are any. Everything is verified at the first one, unless it was (`locate`)."""
    kinds = checkpoints.names(checkpoint)
    chosen = {name: name.removeprefix("model.") for name in kinds if name.startswith("model.")}
    if wanted == torch.float32:
        masters = {name.removeprefix(MASTER): name for name in kinds if name.startswith(MASTER)}
        chosen = {masters.get(plain, name): plain for name, plain in chosen.items()}
    # In this order what one tensor of the directory is made of lies close together.
    ordered = sorted(chosen, key=lambda name: _by_layer(chosen[name]))
    for name, tensor in checkpoints.stream(checkpoint, ordered, verified=verified):
        yield chosen[name], tensor


def _by_layer(name: str) -> list[tuple[int, str]]:
    """To sort names with layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
