"""The frozen weights beside which an adapter is trained: where its run began, and how they are known again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.kernels.weight_codes import quantize_matrix
from meshwright.model.hub import HubFolder
from meshwright.model.hub.weight_names import tensor_sizes
from meshwright.model.hub.weights import check_weights, stored_weights
from meshwright.model.init import fill_initial
from meshwright.model.quantized_formats.folder_format import QuantizedModel, every
from meshwright.model.quantized_formats.folder_quantization import is_quantized
from meshwright.model.quantized_formats.quantized_folder import base_of, decoded_weights, open_folder, open_quantized
from meshwright.model.quantized_weights import frozen_schemes
from meshwright.spec import Plan
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.plan import RANDOM

OTHERWISE = "or model.init=random for new weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFolder:
    """A folder that a run may begin with."""

    hub: HubFolder
    codes: QuantizedModel | None = None
    """What it holds as codes; None = numbers alone."""
    base: str = ""
    """As which model.lora.base."""
    refusal: HubError | None = None
    """Why nothing can be trained beside its codes."""

    def check(self) -> None:
        """Before there is room for a model: HubError where files do not hold what the config says. Codes were checked
        when they were opened."""
        if self.codes is None:
            check_weights(self.hub.path, self.hub.shape)

    def weights(self, wanted: Callable[[str], bool] = every) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        """By our names, as files have them, a tensor or a matrix at a time; of what is not wanted nothing is read."""
        if self.codes is None:
            return stored_weights(self.hub.path, self.hub.shape, wanted)
        return decoded_weights(self.hub.path, self.codes, wanted)


def open_weights(path: Path) -> BaseFolder:
    """A folder of numbers or of codes, whether anything can be trained beside them or not. HubError where it is none,
    or is damaged."""
    hub = open_folder(path)
    if not is_quantized(path):
        return BaseFolder(hub=hub)
    codes = open_quantized(hub)
    try:
        return BaseFolder(hub=hub, codes=codes, base=base_of(hub, codes))
    except HubError as error:
        return BaseFolder(hub=hub, codes=codes, refusal=error)


def open_base(path: Path) -> BaseFolder:
    """HubError where it is none, is damaged, or holds codes that nothing can be trained beside."""
    found = open_weights(path)
    if found.refusal is not None:
        raise found.refusal
    return found


def folder_of_weights(plan: Plan) -> BaseFolder:
    """The folder of `model.init`. PlanError where it is not there, or holds other codes than the plan; HubError where
    it is none."""
    path = Path(plan.init)
    if not path.is_dir():
        raise PlanError(f"model.init={plan.init}: there is no such folder; give the one with the weights, {OTHERWISE}")
    found = open_base(path)
    found.check()
    asked = "" if plan.model.lora is None else plan.model.lora.base
    if found.base not in ("", asked):
        there = f"take model.lora.base={found.base}" if asked else "take model.lora.rank=16, for an adapter beside them"
        raise PlanError(
            f"model.init={plan.init} holds codes ({found.base}), which are frozen as they are: {there}, or the folder "
            "that it was quantized from"
        )
    return found


def base_fingerprint(plan: Plan) -> str:
    """What an adapter's checkpoint keeps of the weights beside which it was trained; empty without adapters."""
    if plan.model.lora is None:
        return ""
    weights = f"random {plan.recipe.seed}" if plan.init == RANDOM else folder_of_weights(plan).hub.fingerprint()
    return f"{weights} as {plan.model.lora.base}" if plan.model.lora.scheme else weights


def base_weights(plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
    """The frozen weights, a tensor at a time, with codes where the plan has them; drawn ones in the `dtype` of the run,
    those of files as there."""
    schemes = frozen_schemes(plan.model)
    for name, found in _unrounded(plan, dtype):
        if isinstance(found, Tensor) and name in schemes:
            found = quantize_matrix(name, found, schemes[name])
        yield name, found


def _unrounded(plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
    if plan.init != RANDOM:
        yield from folder_of_weights(plan).weights()
        return
    for name, size in tensor_sizes(plan.model).items():
        found = torch.zeros(size, dtype=torch.float32 if name.endswith("correction_bias") else dtype)
        if not name.endswith("correction_bias"):
            fill_initial(found, name, plan.model.base, plan.recipe.seed, whole=size)
        yield name, found
