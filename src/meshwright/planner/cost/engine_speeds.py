"""What this package's engine reaches of a device in training, where its own steps were taken apart by kernel. Elsewhere
it is taken to reach what published software does (speeds.py).

On Hopper: one H200 of 700 W, torch 2.11, cuBLAS 13, 2026-11-27, by the profiler's times of whole steps
(docs/accuracy.md). cuBLAS's kernels of 2025 multiply at 770 to 840 TFLOP/s there, where the best product of older ones,
alone on the device, is 794.5; published software of Hopper is held to 0.82 of that. Other devices of that generation
follow by their best product and their memory's rate, which nobody has measured: those plans are predictions.
"""

from dataclasses import replace
from functools import lru_cache

from meshwright.planner.cost.speeds import Speeds, speeds_of
from meshwright.spec.cluster import Device

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
FORWARD, BACKWARD = 0.333, 0.266
"""FlashAttention 2 in those steps."""
HALF, PACKED_HALF = (500.0, 500.0), (900.0, 700.0)
"""Its lengths of half that: 1,024 to 8,192 positions in steps; rows of 8 documents of 1,024 alone."""
UPDATE_SHARES = {"adamw": 0.605, "widen": 0.408, "add": 0.6, "copy": 0.748, "norm": 0.50, "narrow": 0.30, "half": 0.82}
"""Kernels of the optimizer: torch's fused AdamW, gradients widened to fp32, new weights in 16 bits, the norm, this
package's kernel for moments of 8 bits and for those of 16."""


@lru_cache(maxsize=16)
def engine_speeds(device: Device, flash: int = 2) -> Speeds:
    """`flash`: generation of the attention kernel."""
    published = speeds_of(device, flash)
    if not device.name.upper().startswith(HOPPER) or published.kernel is None:
        return published
    found = replace(
        published,
        product_share=PRODUCT_SHARE / published.kernel.figures["rate"],
        unaligned_share=UNALIGNED_SHARE,
        power=POWER,
        tf32_share=TF32_SHARE,
        narrow_heads=1.0,
        grouped_share=GROUPED_SHARE,
        memory_share=MEMORY_SHARE,
        update_shares=UPDATE_SHARES,
        packed_half=PACKED_HALF,
    )
    if flash != 2:
        return found
    slow = device.half_matmul_flop_per_s / device.half_flop_per_s / 0.803 if device.half_matmul_flop_per_s else 1.0
    return replace(
        found, attention=None, attention_half=HALF,
        attention_forward=FORWARD * min(1.0, slow), attention_backward=BACKWARD * min(1.0, slow),
    )  # fmt: skip
