"""The dtypes of weights, gradients and reductions, and the loss scale of fp16.

Skipped steps leave weights and moments unchanged. That is decided on the device: no rank waits, and all agree.
A step is skipped when its loss or gradient is not finite, and when its gradient norm is a spike. The running mean of
the norm is plain over the first HISTORY_STEPS finite steps and exponential afterwards. A spike enters it no larger than
its limit, so a norm that stays higher is soon accepted.
"""

import torch
from torch import Tensor

from meshwright.spec.recipe.recipe import Recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Weights and gradients. Below fp32 the optimizer keeps fp32 masters: 2 + 2 + 4 + 4 + 4 bytes per parameter."""
SMALLEST_LOSS_SCALE = 1.0
"""fp16: below this scale an overflowing gradient is not the scale's fault."""
HISTORY_STEPS = 50
"""Finite steps that the mean needs before it judges. Afterwards it averages over about as many."""
REASONS = (None, "overflow", "non-finite", "spike")
"""Why a step was skipped, by number. overflow: in fp16, while the loss scale can still be halved."""


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
        # In tensors throughout: an `if` would wait for the device in every step.
        good = torch.where(overflow, 0, self.good_steps + 1)
        grows = good >= self.growth_interval
        factor = torch.where(overflow, 0.5, torch.where(grows, 2.0, 1.0))
        self.scale.mul_(factor)
        self.good_steps.copy_(torch.where(grows, 0, good))

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name."""
        return {"scale": self.scale, "good_steps": self.good_steps}


class StepSkipper:
    """Statistics of earlier steps: mean norm, number of steps in it, bad steps in a row, skipped steps.

    The counts are those of the run under any layout. They are part of a checkpoint (`values`).
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.state = torch.zeros(4, device=device)

    def judge(self, loss: Tensor, norm: Tensor, *, spike_factor: float, may_overflow: Tensor | None = None) -> Tensor:
        """Return the number of the reason in REASONS () fp32, and add the step to the state. 0 = the step counts.

        Args:
            spike_factor: A norm above this many means is a spike. 0 = never.
            may_overflow: () bool. fp16: a non-finite gradient is the loss scale's fault.
        """
        mean, measured, in_a_row, skipped = self.state.unbind()
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        limit = torch.full_like(norm, torch.inf)
        if spike_factor:
            limit = torch.where(measured >= HISTORY_STEPS, spike_factor * mean, limit)
        spike = finite & (norm > limit)
        # An infinite loss is not the scale's fault: it comes out of the forward pass, before the scale.
        overflow = torch.zeros_like(finite)
        if may_overflow is not None:
            overflow = torch.isfinite(loss) & ~torch.isfinite(norm) & may_overflow
        # A number of REASONS: 0 = the step counts.
        reason = torch.where(finite, 3.0 * spike, torch.where(overflow, 1.0, 2.0))
        # A spike enters the mean no larger than its limit, so a norm that stays higher is soon accepted.
        moved = mean + (torch.minimum(norm, limit) - mean) / (measured + 1).clamp(max=HISTORY_STEPS)
        self.state = torch.stack(
            (
                torch.where(finite, moved, mean),
                (measured + finite).clamp(max=HISTORY_STEPS),
                # Overflows of fp16 are part of a healthy run, and do not count as bad steps in a row.
                torch.where(finite, 0.0, torch.where(overflow, in_a_row, in_a_row + 1)),
                skipped + (reason > 0),
            )
        )
        return reason

    def values(self) -> list[float]:
        """Return the state for a checkpoint. Waits for the device."""
        numbers: list[float] = self.state.tolist()
        return numbers

    def restore(self, values: list[float]) -> None:
        """Restore what `values` returned."""
        self.state = torch.tensor(values, dtype=torch.float32, device=self.state.device)
