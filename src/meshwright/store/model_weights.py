"""Weights of a model: of a run's checkpoint, without the optimizer, or the frozen base weights of an adapter run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.formats.hub import HubFolder
from meshwright.formats.hub.directory import check_weights, stored_weights
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.formats.quantized.detection import is_quantized
from meshwright.formats.quantized.folder import base_of, decoded_weights, open_folder, open_quantized
from meshwright.formats.quantized.interface import QuantizedModel, every
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model.init import fill_initial
from meshwright.model.low_rank import merge_adapter
from meshwright.model.quantized_weights import frozen_schemes
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, CheckpointError, HubError, PlanError, argument
from meshwright.spec.plan.plan import RANDOM
from meshwright.spec.weights.inventory import adapter_parts
from meshwright.store import checkpoint as checkpoints
from meshwright.store import checkpoint_folder
from meshwright.store.run_folder import BEST, LAST, RunFolder, check_checkpoint

OTHERWISE = "or model.init=random for new weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFolder:
    """A model folder that a run can start from."""

    hub: HubFolder
    codes: QuantizedModel | None = None
    """The quantized weights in the folder. None = all weights are plain numbers."""
    base: str = ""
    """The value of `model.lora.base` that describes the codes. Empty = no codes."""
    refusal: HubError | None = None
    """Why no adapter can be trained on these codes. None = one can."""

    def check(self) -> None:
        """Check that the files hold what config.json declares, before memory is taken for the model.

        Codes were checked when they were opened. Raises HubError.
        """
        if self.codes is None:
            check_weights(self.hub.path, self.hub.shape)

    def weights(self, wanted: Callable[[str], bool] = every) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        """Yield (name, weight) one at a time, as stored, under Meshwright's names. Unwanted names are not read."""
        if self.codes is None:
            return stored_weights(self.hub.path, self.hub.shape, wanted)
        return decoded_weights(self.hub.path, self.codes, wanted)


def open_weights(path: Path) -> BaseFolder:
    """Open a folder of plain or quantized weights, trainable or not.

    Raises HubError when the path holds no model or a damaged one.
    """
    hub = open_folder(path)
    if not is_quantized(path):
        return BaseFolder(hub=hub)
    codes = open_quantized(hub)
    try:
        return BaseFolder(hub=hub, codes=codes, base=base_of(hub, codes))
    except HubError as error:
        return BaseFolder(hub=hub, codes=codes, refusal=error)


def open_base(path: Path) -> BaseFolder:
    """Open a folder that a run can start from.

    Raises HubError when the path holds no model, a damaged one, or codes on which nothing can be trained.
    """
    folder = open_weights(path)
    if folder.refusal is not None:
        raise folder.refusal
    return folder


def folder_of_weights(plan: Plan) -> BaseFolder:
    """Open the folder that `model.init` names.

    Raises PlanError when it does not exist or its codes differ from the plan's, HubError when it holds no model.
    """
    path = Path(plan.init)
    if not path.is_dir():
        raise PlanError(f"model.init={plan.init} does not exist: give the folder with the weights, {OTHERWISE}")
    folder = open_base(path)
    folder.check()
    planned_base = "" if plan.model.lora is None else plan.model.lora.base
    # Plain weights fit any plan, since they are quantized as it asks.
    if folder.base not in ("", planned_base):
        remedy = f"base={folder.base}" if planned_base else "rank=16, for an adapter on them"
        raise PlanError(
            f"model.init={plan.init} holds codes ({folder.base}), which stay as they are: take "
            f"model.lora.{remedy}, or the folder that it was quantized from"
        )
    return folder


def base_fingerprint(plan: Plan) -> str:
    """Return the string by which an adapter's checkpoint recognizes its base weights. Empty without adapters."""
    if plan.model.lora is None:
        return ""
    weights = f"random {plan.recipe.seed}" if plan.init == RANDOM else folder_of_weights(plan).hub.fingerprint()
    return f"{weights} as {plan.model.lora.base}" if plan.model.lora.scheme else weights


def base_weights(plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
    """Yield the frozen weights one at a time, quantized where the plan asks for codes.

    Random weights are drawn in `dtype`; weights from files keep their stored dtype.
    """
    schemes = frozen_schemes(plan.model)
    stored = _draw_weights(plan, dtype) if plan.init == RANDOM else folder_of_weights(plan).weights()
    for name, weight in stored:
        if isinstance(weight, Tensor) and name in schemes:
            weight = quantize_matrix(name, weight, schemes[name])
        yield name, weight


def _draw_weights(plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, size in tensor_sizes(plan.model).items():
        weight = torch.zeros(size, dtype=torch.float32 if name.endswith("correction_bias") else dtype)
        if not name.endswith("correction_bias"):
            fill_initial(weight, name, plan.model.base, plan.recipe.seed, whole=size)
        yield name, weight


MASTER = "optimizer.master."
"""Prefix of the fp32 master weights in checkpoints of runs with lower precision."""


def locate(source: Path, which: str = LAST) -> tuple[RunFolder, Path]:
    """Return the run and the verified checkpoint that `source` names.

    `source` is a checkpoint, or a run folder of which `which` chooses one: last, best, or the number of a step. Raises
    ArgumentError, CheckpointError.
    """
    # A run folder may be named like a checkpoint, and only a run has a plan.
    if checkpoint_folder.is_checkpoint(source) and not (source / "plan.yaml").is_file():
        if which != LAST:
            raise ArgumentError(
                "checkpoint", which, remedy=f"{source} is a checkpoint already; give the run folder, or leave it"
            )
        return RunFolder.open(source.resolve().parent.parent), checkpoints.verify_named(source)
    run = RunFolder.open(source)
    if which != LAST:
        return run, checkpoints.verify_named(_choose(run, which))
    newest = checkpoints.find_newest_whole(checkpoint_folder.list_newest_first(run.checkpoints))
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
    if checkpoints.read_values(checkpoint).get("base") != base_fingerprint(plan):
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
        yield name, (merge_adapter(tensor.float(), low, lora) if low else tensor).to(dtype)


def _choose(run: RunFolder, which: str) -> Path:
    """Return the path of the best checkpoint, or of the one of a step."""
    listing = checkpoint_folder.list_checkpoints(run.checkpoints)
    if which == BEST:
        best = checkpoints.find_best(run.checkpoints)
        if best is None:
            raise CheckpointError(
                f"{argument('checkpoint', 'best')}: no checkpoint of {run.path} has a held-out loss: take "
                f"{argument('checkpoint', 'last')}. For the next run set data.validation, and save checkpoints "
                "at evaluations"
            )
        return best
    check_checkpoint(which)
    path = next((run.checkpoints / saved.name for saved in listing if saved.step == int(which)), None)
    if path is None:
        steps = ", ".join(str(saved.step) for saved in listing) or "none"
        raise CheckpointError(
            f"{argument('checkpoint', which)}: {run.path} has no checkpoint of that step, it has: {steps}"
        )
    return path


def weights(checkpoint: Path, wanted: torch.dtype, *, verified: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) of a checkpoint, layer after layer. With `wanted` fp32, master weights where they exist.

    All files are verified before the first weight unless `verified` is set, as after `locate`.
    """
    kinds = checkpoints.names(checkpoint)
    plain_names = {name: name.removeprefix("model.") for name in kinds if name.startswith("model.")}
    if wanted == torch.float32:
        masters = {name.removeprefix(MASTER): name for name in kinds if name.startswith(MASTER)}
        plain_names = {masters.get(plain, name): plain for name, plain in plain_names.items()}
    # Layer order keeps together the parts from which an exporter builds one tensor.
    ordered = sorted(plain_names, key=lambda name: _by_layer(plain_names[name]))
    for name, tensor in checkpoints.stream(checkpoint, ordered, verified=verified):
        yield plain_names[name], tensor


def _by_layer(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
