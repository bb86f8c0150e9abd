"""What this package's engine reaches of a device in training, where its own steps were taken apart by kernel. Elsewhere
it is taken to reach what published software does (speeds.py).

On Hopper: one H200 of 700 W, torch 2.11, cuBLAS 13, 2026-11-27, by the profiler's times of whole steps
(docs/accuracy.md). cuBLAS's kernels of 2025 multiply at 770 to 840 TFLOP/s there, where the best product of older ones,
alone on the device, is 794.5; published software of Hopper is held to 0.82 of that. Other devices of that generation
follow by their best product and their memory's rate, which nobody has measured: those plans are predictions.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from meshwright.planner.cost.speeds import Speeds, speeds_of
from meshwright.planner.cost.stack import Stack
from meshwright.spec.attention_kernels import HOPPER as ATTENTION
from meshwright.spec.attention_kernels import (
    LEAST_CUDNN,
    AttentionCall,
    AttentionRates,
    GpuLibraries,
    KernelChoice,
    attention_call,
    attention_kernel,
    has_flash_4,
)
from meshwright.spec.cluster import Device
from meshwright.spec.plan import Plan

HOPPER = ("H100", "H200", "H800", "GH200")
"""Beginnings of the names of devices that have these processors."""
PRODUCT_SHARE = 1.05
"""Of the best published product, by tiles that are long inside."""
UNALIGNED_SHARE = 0.155
"""Over that: GPT-2's head of 50,257 words takes 4.96 ms for a chunk of 2,521 rows (kernels of an older generation)."""
TF32_SHARE = 0.56
"""Products and attention of a step in fp32 with TF32, together."""
POWER = (1.94, 1.0)
"""Speeds.slowed's."""
GROUPED_SHARE = 0.76
"""Over that: CUTLASS's grouped kernel, with rows of experts as they come."""
MEMORY_SHARE = 0.84
"""Fused kernels of SwiGLU, rotation and loss, alone: 0.84 to 0.99 of a copy of 4,134 GB/s."""
PACKED_HALF = (900.0, 700.0)
"""FlashAttention 2 over documents, from rows of 8 documents of 1,024 alone."""
UPDATE_SHARES = {"adamw": 0.605, "widen": 0.408, "add": 0.6, "copy": 0.748, "norm": 0.50, "narrow": 0.30, "half": 0.82}
"""Kernels of the optimizer: torch's fused AdamW, gradients widened to fp32, new weights in 16 bits, the norm, this
package's kernel for moments of 8 bits and for those of 16; that for fp32 states is taken to be as fast as the last."""


WIDEST_FLASH = 256
"""Heads that FlashAttention 2 takes at most."""
BLACKWELL = ("B200", "B300", "GB200", "GB300")


def planned_speeds(stack: Stack, plan: Plan) -> Speeds:
    """Of a plan's device, with the kernels that attend there."""
    device, flash = plan.cluster.device, attention_of(stack, plan)
    return engine_speeds(device, flash, takes_flash_4(plan)) if stack.own else speeds_of(device, flash)


def attention_of(stack: Stack, plan: Plan) -> Literal[1, 2, 3]:
    """Generation of the kernel that attends whole rows of a plan, as the engine chooses it."""
    if not stack.own or stack.flash < 3:
        return stack.flash
    call = attention_call(plan)._replace(case="rows")
    return 3 if _planned_kernel(call, plan.cluster.device).kernel == "cudnn" else 2


def takes_flash_4(plan: Plan) -> bool:
    """Whether documents and windows of a plan go through FlashAttention 4."""
    call = attention_call(plan)
    return call.case != "rows" and _planned_kernel(call, plan.cluster.device).kernel == "flash-4"


def prompt_kernel(device: Device, width: int, value_width: int) -> tuple[KernelChoice, AttentionRates] | None:
    """Kernel that attends to prompts in this package's serving engine, for heads of two widths, and its rates. None
    where only published rates are known: on other devices than Hopper, and for heads wider than FlashAttention's."""
    if not device.name.upper().startswith(HOPPER) or max(width, value_width) > WIDEST_FLASH:
        return None
    choice = _planned_kernel(AttentionCall("cache", 0, width, value_width, gradients=False), device)
    return choice, _reached(device, choice.kernel)


def _planned_kernel(call: AttentionCall, device: Device) -> KernelChoice:
    """Kernel that attends on a plan's device. FlashAttention 4 is taken to be installed there where it is here."""
    return attention_kernel(call, GpuLibraries(_major(device), LEAST_CUDNN, has_flash_4()))


def _major(device: Device) -> int:
    """Compute capability of a device, its first number, from Hopper on; 0 = older, or another maker's."""
    name = device.name.upper()
    return 9 if name.startswith(HOPPER) else 10 if name.startswith(BLACKWELL) else 0


def _reached(device: Device, kernel: str) -> AttentionRates:
    """Of a kernel on a Hopper device; one of less power multiplies more slowly than its data sheet says."""
    slow = min(1.0, device.half_matmul_flop_per_s / device.half_flop_per_s / 0.803)
    rates = ATTENTION[kernel]
    return rates._replace(forward=rates.forward * slow, backward=rates.backward * slow)


@lru_cache(maxsize=16)
def engine_speeds(device: Device, flash: int = 2, flash_4: bool = False) -> Speeds:
    """`flash`: 2, or 3 for cuDNN's attention of whole rows. `flash_4`: documents and windows go through FlashAttention
    4 (spec/attention_kernels.py)."""
    published = speeds_of(device, flash)
    if not device.name.upper().startswith(HOPPER) or not device.half_matmul_flop_per_s:
        return published
    assert published.kernel is not None, "a preset's products are modelled"
    found = replace(
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
        found, attention=None, parted=reached["flash"], bordered=reached["flash-4"] if flash_4 else None,
        attention_forward=rows.forward, attention_backward=rows.backward,
        attention_half=(rows.half, rows.half), narrow_heads=rows.narrow,
    )  # fmt: skip
