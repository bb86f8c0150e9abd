"""Second stage of a sum: the partial sums of a kernel's programs become one gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div

PARTS, COLUMNS = 512, 16
"""Tile of parts that are summed: rows of 64 bytes, in as many programs as there are such columns."""


@triton.jit
def sum_parts(
    parts: Arg, out: Arg, number: Arg, width: Arg, PARTS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:  # fmt: skip
    """Compute the sums over rows of parts (number, width), rounded once."""
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros((PARTS, COLUMNS), tl.float32)
    for start in range(0, number, PARTS):
        row = start + tl.arange(0, PARTS)[:, None]
        total += tl.load(parts + row * width + column, mask=(row < number) & (column < width), other=0.0)
    sums = tl.sum(total, 0)[None, :]
    tl.store(out + column, sums.to(out.dtype.element_ty), mask=column < width)


def summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum parts (P, ...) fp32 of the programs of a kernel to (...) in `dtype`, in a fixed order.

    One kernel: torch's sum over the first dim has few programs, and rounding would be another pass.
    """
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    width = out.numel()
    sum_parts[(ceil_div(width, COLUMNS),)](
        parts, out, len(parts), width, PARTS=PARTS, COLUMNS=COLUMNS, num_warps=8
    )  # fmt: skip
    return out
