"""A matrix of 4-bit codes restored in one kernel: codes, scales and zeros are read once, the matrix is written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import ELEMENTS, Arg, ceil_div, power_of_two

WARPS = 4


@triton.jit
def restore_rows(
    codes: Arg, scales: Arg, zeros: Arg, numbers: Arg, out: Arg, row_bytes: Arg, width: Arg, groups: Arg, group: Arg,
    zero_stride: Arg, ZEROS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """out (N, K) = S (number of the code - Z); codes (N, row_bytes), the first of two in the lower half; scales
    (N, groups); numbers (16,) fp32. ZEROS: none, (N, groups), or half a byte each, as codes."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    both = tl.load(codes + row * row_bytes + at // 2, mask=inside, other=0).to(tl.int32)
    found = tl.load(numbers + ((both >> ((at % 2) * 4)) & 15))
    of_group = at // group
    if ZEROS == 1:
        found = found - tl.load(zeros + row * zero_stride + of_group, mask=inside, other=0.0).to(tl.float32)
    if ZEROS == 2:
        pair = tl.load(zeros + row * zero_stride + of_group // 2, mask=inside, other=0).to(tl.int32)
        found = found - ((pair >> ((of_group % 2) * 4)) & 15).to(tl.float32)
    found = found * tl.load(scales + row * groups + of_group, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, found.to(out.dtype.element_ty), mask=inside)


def restore(codes: Tensor, scales: Tensor, zeros: Tensor | None, numbers: Tensor, group: int, out: Tensor) -> Tensor:
    """Fill `out` (N, K), contiguous, from codes (N, ceil(K / 2)), scales and zeros (N, groups), and the numbers of
    the 16 codes; so many inputs share a scale. Zeros in uint8 are half a byte each, as codes."""
    rows, width = out.shape
    block = min(ELEMENTS, power_of_two(width))
    restore_rows[(rows, ceil_div(width, block))](
        codes, scales, scales if zeros is None else zeros, numbers, out, codes.shape[1], width, scales.shape[1],
        group or width, 0 if zeros is None else zeros.stride(0),
        ZEROS=0 if zeros is None else 2 if zeros.dtype == torch.uint8 else 1, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return out
