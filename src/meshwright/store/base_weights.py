"""The frozen weights beside which an adapter is trained: where its run began, and how they are known again."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwright.model.hub import HubFolder, import_folder
from meshwright.model.hub.weight_names import tensor_sizes
from meshwright.model.hub.weights import stored_weights
from meshwright.model.init import fill_initial
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError
from meshwright.spec.plan import RANDOM

OTHERWISE = "or model.init=random for new weights"


def folder_of_weights(plan: Plan) -> HubFolder:
    """The folder of `model.init`. PlanError where it is not there, HubError where it is none."""
    path = Path(plan.init)
    if not path.is_dir():
        raise PlanError(f"model.init={plan.init}: there is no such folder; give the one with the weights, {OTHERWISE}")
    return import_folder(path)


def base_fingerprint(plan: Plan) -> str:
    """What an adapter's checkpoint keeps of the weights beside which it was trained; empty without adapters."""
    if plan.model.lora is None:
        return ""
    weights = f"random {plan.recipe.seed}" if plan.init == RANDOM else folder_of_weights(plan).fingerprint()
    return f"{weights} as {plan.model.lora.base}" if plan.model.lora.scheme else weights


def base_weights(plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The frozen weights, a tensor at a time; drawn ones in the `dtype` of the run, those of files as there."""
    if plan.init != RANDOM:
        yield from stored_weights(Path(plan.init), plan.model.base)
        return
    for name, size in tensor_sizes(plan.model).items():
        found = torch.zeros(size, dtype=torch.float32 if name.endswith("correction_bias") else dtype)
        if not name.endswith("correction_bias"):
            fill_initial(found, name, plan.model.base, plan.recipe.seed, whole=size)
        yield name, found
