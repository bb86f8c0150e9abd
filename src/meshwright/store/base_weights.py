"""Frozen base weights of an adapter run: the folder they come from, and the fingerprint that recognizes them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.formats.hub import HubFolder
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.formats.hub.weights import check_weights, stored_weights
from meshwright.formats.quantized.detection import is_quantized
from meshwright.formats.quantized.folder import base_of, decoded_weights, open_folder, open_quantized
from meshwright.formats.quantized.interface import QuantizedModel, every
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model.init import fill_initial
from meshwright.model.quantized_weights import frozen_schemes
from meshwright.spec import Plan
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.plan.plan import RANDOM

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
    """Why no adapter can be trained beside these codes. None = one can."""

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

    Raises HubError when the path holds no model, a damaged one, or codes beside which nothing can be trained.
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
        remedy = f"base={folder.base}" if planned_base else "rank=16, for an adapter beside them"
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
    for name, weight in _unrounded(plan, dtype):
        if isinstance(weight, Tensor) and name in schemes:
            weight = quantize_matrix(name, weight, schemes[name])
        yield name, weight


def _unrounded(plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
    if plan.init != RANDOM:
        yield from folder_of_weights(plan).weights()
        return
    for name, size in tensor_sizes(plan.model).items():
        weight = torch.zeros(size, dtype=torch.float32 if name.endswith("correction_bias") else dtype)
        if not name.endswith("correction_bias"):
            fill_initial(weight, name, plan.model.base, plan.recipe.seed, whole=size)
        yield name, weight
