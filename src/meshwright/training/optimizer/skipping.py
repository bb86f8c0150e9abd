"""Skipping of steps, which leaves weights and moments unchanged. Decided on the device: no rank waits, all agree.

A step is skipped when its loss or gradient is not finite, and when its gradient norm is a spike. The running mean of
the norm is plain over the first HISTORY_STEPS finite steps and exponential afterwards. A spike enters it no larger than
its limit, so a norm that stays higher is soon accepted.
"""

import torch
from torch import Tensor

HISTORY_STEPS = 50
"""Finite steps that the mean needs before it judges. Afterwards it averages over about as many."""
REASONS = (None, "overflow", "non-finite", "spike")
"""Why a step was skipped, by number. overflow: in fp16, while the loss scale can still be halved."""


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
        overflow = torch.zeros_like(finite)
        if may_overflow is not None:
            overflow = torch.isfinite(loss) & ~torch.isfinite(norm) & may_overflow
        # A number of REASONS: 0 = the step counts.
        reason = torch.where(finite, 3.0 * spike, torch.where(overflow, 1.0, 2.0))
        moved = mean + (torch.minimum(norm, limit) - mean) / (measured + 1).clamp(max=HISTORY_STEPS)
        self.state = torch.stack(
            (
                torch.where(finite, moved, mean),
                (measured + finite).clamp(max=HISTORY_STEPS),
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
