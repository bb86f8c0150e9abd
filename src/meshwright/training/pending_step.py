"""A step that was begun, and what is recorded of it once its numbers have come to the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parallel.group import Group
from meshwright.spec import Plan
from meshwright.spec.flop import token_flop
from meshwright.training import device
from meshwright.training.rate import learning_rate
from meshwright.training.readback import Readback
from meshwright.training.skipping import REASONS
from meshwright.training.step import StepResult
from meshwright.training.step_clock import StepSpan
from meshwright.training.watch import StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step that the device may still be computing."""

    step: int
    global_batch: int
    tokens: int
    """Of the run, this step included."""
    span: StepSpan
    data_wait_s: float
    part: Tensor
    """Of StepResult."""
    micro_tokens: tuple[float, ...]
    numbers: Readback


def readback(result: StepResult, **more: Tensor | None) -> Readback:
    """What the host wants to know of a step, on its way; `more` by name, None is left out."""
    values = {"loss": result.loss, "grad_norm": result.grad_norm, "reason": result.reason, "balance": result.balance}
    squared = torch.stack(result.micro_squared) if result.micro_squared else None
    values |= {"micro_squared": squared, "figures": result.figures if len(result.figures) else None, **more}
    return Readback({name: value for name, value in values.items() if value is not None})


def first_without_number(world: Group, part: Tensor) -> str:
    """The first rank whose own part of the loss is not finite. All ranks ask, once the sum is not."""
    finite = world.all_gather(torch.isfinite(part).reshape(1)).tolist()
    return "all ranks" if all(finite) else f"rank {finite.index(False)}"


def step_metrics(
    plan: Plan,
    pending: PendingStep,
    found: dict[str, list[float]],
    *,
    device_used: torch.device,
    run_s: float,
    noise_scale_tokens: float | None,
) -> StepMetrics:
    """The record of a step; `found` is what its readback gave."""
    use = device.memory(device_used)
    rate = pending.global_batch * plan.recipe.sequence / pending.span.seconds
    peak = device.peak_flop_per_s(device_used, plan.recipe.precision, plan.cluster.device)
    peak = peak * plan.layout.world if peak else None
    causal, full = (token_flop(plan.model, plan.recipe.sequence, causal=causal) for causal in (True, False))
    skipped = int(found["skipping"][3])
    return StepMetrics(
        step=pending.step,
        loss=found["loss"][0],
        grad_norm=found["grad_norm"][0],
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
        balance_loss=found["balance"][0] if "balance" in found else None,
        loss_scale=found["loss_scale"][0] if "loss_scale" in found else None,
        global_batch=pending.global_batch,
        skipped=REASONS[int(found["reason"][0])],
        skipped_steps=skipped or None,
        figures=dict(zip(plan.recipe.traits.figures, found.get("figures", ()), strict=True)),
    )
