"""Rates that Meshwright's engine reaches in training, where its own steps were measured kernel by kernel.

Elsewhere it is assumed to reach the rates of published software (speeds.py).

On Hopper: one H200 of 700 W, torch 2.11, cuBLAS 13, 2026-11-27, by the profiler's times of whole steps
(docs/accuracy.md). cuBLAS's kernels of 2025 multiply at 770 to 840 TFLOP/s there. The best product of older ones, alone
on the device, reaches 794.5, and published software of Hopper is held to 0.82 of that. Other Hopper devices scale by
their best product and memory rate. That is unmeasured, so their plans are predictions.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from meshwright.planner.cost.speeds import Speeds, speeds_of
from meshwright.planner.cost.stack import Stack
from meshwright.spec.layout.cluster import Device
from meshwright.spec.plan.execution import HOPPER as ATTENTION
from meshwright.spec.plan.execution import (
    LEAST_CUDNN,
    AttentionCall,
    AttentionRates,
    GpuLibraries,
    KernelChoice,
    attention_call,
    attention_kernel,
    has_flash_4,
)
from meshwright.spec.plan.plan import Plan

HOPPER = ("H100", "H200", "H800", "GH200")
"""Prefixes of the names of Hopper devices."""
PRODUCT_SHARE = 1.05
"""Share of the best published product, for tiles with a long inner dim."""
UNALIGNED_SHARE = 0.155
"""Further factor.

GPT-2's head of 50,257 words takes 4.96 ms for a chunk of 2,521 rows (kernels of an older generation).
"""
TF32_SHARE = 0.56
"""Products and attention of an fp32 step with TF32, together."""
POWER = (1.94, 1.0)
"""Argument of Speeds.slowed."""
GROUPED_SHARE = 0.76
"""Further factor: CUTLASS's grouped kernel with experts' uneven rows."""
MEMORY_SHARE = 0.84
"""Fused kernels of SwiGLU, rotation and loss, alone: 0.84 to 0.99 of a copy at 4,134 GB/s."""
PACKED_HALF = (900.0, 700.0)
"""FlashAttention 2 over documents, measured with rows of 8 documents of 1,024 tokens only."""
UPDATE_SHARES = {"adamw": 0.605, "widen": 0.408, "add": 0.6, "copy": 0.748, "norm": 0.50, "narrow": 0.30, "half": 0.82}
"""Shares of the optimizer's kernels.

torch's fused AdamW, gradients widened to fp32, new weights in 16 bits, the norm, Meshwright's kernels for 8-bit and
16-bit moments. The kernel for fp32 states is assumed to be as fast as the last.
"""


WIDEST_FLASH = 256
"""Widest head that FlashAttention 2 takes."""
BLACKWELL = ("B200", "B300", "GB200", "GB300")


def planned_speeds(stack: Stack, plan: Plan) -> Speeds:
    """Return the speeds of a plan's device, with the attention kernels used there."""
    device, flash = plan.cluster.device, attention_of(stack, plan)
    return engine_speeds(device, flash, takes_flash_4(plan)) if stack.is_meshwright else speeds_of(device, flash)


def attention_of(stack: Stack, plan: Plan) -> Literal[1, 2, 3]:
    """Return the generation of the kernel that the engine chooses for whole rows of a plan."""
    if not stack.is_meshwright or stack.flash < 3:
        return stack.flash
    call = attention_call(plan)._replace(case="rows")
    return 3 if _planned_kernel(call, plan.cluster.device).kernel == "cudnn" else 2


def takes_flash_4(plan: Plan) -> bool:
    """Return True if documents and windows of a plan use FlashAttention 4."""
    call = attention_call(plan)
    return call.case != "rows" and _planned_kernel(call, plan.cluster.device).kernel == "flash-4"


def prompt_kernel(device: Device, width: int, value_width: int) -> tuple[KernelChoice, AttentionRates] | None:
    """Return the kernel for prompts in Meshwright's serving engine, for heads of two widths, and its rates.

    Returns None where only published rates are known: on devices other than Hopper, and for heads wider than
    FlashAttention's.
    """
    if not device.name.upper().startswith(HOPPER) or max(width, value_width) > WIDEST_FLASH:
        return None
    choice = _planned_kernel(AttentionCall("cache", 0, width, value_width, gradients=False), device)
    return choice, _reached(device, choice.kernel)


def _planned_kernel(call: AttentionCall, device: Device) -> KernelChoice:
    """Return the attention kernel on a plan's device. FlashAttention 4 is assumed there if it is installed here."""
    return attention_kernel(call, GpuLibraries(_major(device), LEAST_CUDNN, has_flash_4()))


def _major(device: Device) -> int:
    """Return the major compute capability of a device from Hopper on. 0 = older, or another maker's."""
    name = device.name.upper()
    return 9 if name.startswith(HOPPER) else 10 if name.startswith(BLACKWELL) else 0


def _reached(device: Device, kernel: str) -> AttentionRates:
    """Return the rates of a kernel on a Hopper device. With less power it is slower than its data sheet says."""
    slow = min(1.0, device.half_matmul_flop_per_s / device.half_flop_per_s / 0.803)
    rates = ATTENTION[kernel]
    return rates._replace(forward=rates.forward * slow, backward=rates.backward * slow)


@lru_cache(maxsize=16)
def engine_speeds(device: Device, flash: int = 2, flash_4: bool = False) -> Speeds:
    """Return the engine's speeds on a device.

    Args:
        flash: 2, or 3 for cuDNN's attention of whole rows.
        flash_4: Documents and windows use FlashAttention 4 (spec/plan/execution.py).
    """
    published = speeds_of(device, flash)
    if not device.name.upper().startswith(HOPPER) or not device.half_matmul_flop_per_s:
        return published
    assert published.kernel is not None, "a preset's products are modelled"
    # rates of whole steps, which the engine reached, replace those of published software
    measured = replace(
        published,
        product_share=PRODUCT_SHARE / published.kernel.figures["rate"],
        unaligned_share=UNALIGNED_SHARE,
        power=POWER,
        tf32_share=TF32_SHARE,
        grouped_share=GROUPED_SHARE,
        memory_share=MEMORY_SHARE,
        update_shares=UPDATE_SHARES,
        packed_half=PACKED_HALF,
    )
    reached = {kernel: _reached(device, kernel) for kernel in ATTENTION}
    rows = reached["flash" if flash == 2 else "cudnn"]
    return replace(
        measured, attention=None, parted=reached["flash"], bordered=reached["flash-4"] if flash_4 else None,
        attention_forward=rows.forward, attention_backward=rows.backward,
        attention_half=(rows.half, rows.half), narrow_heads=rows.narrow,
    )  # fmt: skip
