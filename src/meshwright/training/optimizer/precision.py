"""The dtypes of weights, gradients and reductions, and the loss scale of fp16."""

import torch
from torch import Tensor

from meshwright.spec.recipe.recipe import Recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Weights and gradients. Below fp32 the optimizer keeps fp32 masters: 2 + 2 + 4 + 4 + 4 bytes per parameter."""
SMALLEST_LOSS_SCALE = 1.0
"""fp16: below this scale an overflowing gradient is not the scale's fault."""


def reduce_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype in which gradients are summed over micro-batches and ranks."""
    return torch.float32 if recipe.reduce_dtype == "fp32" else DTYPES[recipe.precision]


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740), all on the device.

    The loss is multiplied by `scale`, so that small gradients survive fp16. A step whose gradient overflows is skipped
    and halves the scale; `growth_interval` good steps double it.
    """

    def __init__(self, device: torch.device, *, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.growth_interval = growth_interval

    def can_halve(self) -> Tensor:
        """Return () bool: whether an overflow can be the scale's fault.

        It can while half the scale is at least SMALLEST_LOSS_SCALE.
        """
        return self.scale >= 2 * SMALLEST_LOSS_SCALE

    def update(self, overflow: Tensor) -> None:
        """Adapt the scale after a step. `overflow` is a bool tensor ()."""
        good = torch.where(overflow, 0, self.good_steps + 1)
        grows = good >= self.growth_interval
        factor = torch.where(overflow, 0.5, torch.where(grows, 2.0, 1.0))
        self.scale.mul_(factor)
        self.good_steps.copy_(torch.where(grows, 0, good))

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name."""
        return {"scale": self.scale, "good_steps": self.good_steps}
