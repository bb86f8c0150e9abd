"""A started step, and its record once its numbers have reached the host."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parallel.groups.group import Group
from meshwright.spec import Plan
from meshwright.spec.weights.flop import token_flop
from meshwright.training import device, step_clock
from meshwright.training.optimizer.rate import learning_rate
from meshwright.training.optimizer.skipping import REASONS
from meshwright.training.step.step import StepResult
from meshwright.training.step.watch import StepMetrics
from meshwright.training.step_clock import StepSpan


class Readback:
    """Small fp32 tensors by name. A training step waits for the device only in `read`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        packed = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])
        self._host = packed.to("cpu", non_blocking=True)  # page-locked memory when it comes from a GPU
        self.border = step_clock.mark_border(packed.device)
        """The end of the step and of the copy."""

    def read(self) -> dict[str, list[float]]:
        """Wait until the device has computed the numbers, and return them by name."""
        self.border.wait()
        numbers, values = self._host.tolist(), {}
        for name, size in self._sizes.items():
            values[name], numbers = numbers[:size], numbers[size:]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step that the device may still be computing."""

    step: int
    global_batch: int
    tokens: int
    """Tokens of the run, including this step."""
    span: StepSpan
    data_wait_s: float
    part: Tensor
    """See StepResult."""
    micro_tokens: tuple[float, ...]
    numbers: Readback


def readback(outcome: StepResult, **more: Tensor | None) -> Readback:
    """Start copying a step's numbers to the host, with `more` by name. None is left out."""
    tensors = {
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
        "reason": outcome.reason,
        "balance": outcome.balance,
        "micro_squared": torch.stack(outcome.micro_squared) if outcome.micro_squared else None,
        "figures": outcome.figures if len(outcome.figures) else None,
        **more,
    }
    return Readback({name: tensor for name, tensor in tensors.items() if tensor is not None})


def first_without_number(world: Group, part: Tensor) -> str:
    """Name the first rank whose part of the loss is not finite. All ranks call this once the sum is not."""
    finite = world.all_gather(torch.isfinite(part).reshape(1)).tolist()
    return "all ranks" if all(finite) else f"rank {finite.index(False)}"


def step_metrics(
    plan: Plan,
    pending: PendingStep,
    values: dict[str, list[float]],
    *,
    device_used: torch.device,
    run_s: float,
    noise_scale_tokens: float | None,
) -> StepMetrics:
    """Return the record of a step from the values of its readback."""
    use = device.memory(device_used)
    rate = pending.global_batch * plan.recipe.sequence / pending.span.seconds
    peak = device.peak_flop_per_s(device_used, plan.recipe.precision, plan.cluster.device)
    peak = peak * plan.layout.world if peak else None
    causal, full = (token_flop(plan.model, plan.recipe.sequence, causal=causal) for causal in (True, False))
    skipped = int(values["skipping"][3])
    return StepMetrics(
        step=pending.step,
        loss=values["loss"][0],
        grad_norm=values["grad_norm"][0],
        lr=learning_rate(plan.recipe, pending.step),
        tokens=pending.tokens,
        tokens_per_second=rate,
        seconds=run_s,
        step_seconds=pending.span.seconds,
        data_wait_seconds=pending.data_wait_s,
        pause_seconds=pending.span.pause_s or None,
        allocated_bytes=use.allocated_bytes,
        reserved_bytes=use.reserved_bytes,
        mfu_causal=rate * causal.training / peak if peak else None,
        mfu_full=rate * full.training / peak if peak else None,
        hfu=rate * causal.hardware(plan.layout.acting_recompute, plan.recomputed_share) / peak if peak else None,
        noise_scale_tokens=noise_scale_tokens,
        balance_loss=values["balance"][0] if "balance" in values else None,
        loss_scale=values["loss_scale"][0] if "loss_scale" in values else None,
        global_batch=pending.global_batch,
        skipped=REASONS[int(values["reason"][0])],
        skipped_steps=skipped or None,
        figures=dict(zip(plan.recipe.traits.figures, values.get("figures", ()), strict=True)),
    )
