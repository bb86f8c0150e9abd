"""Sizes of the pieces that one program of a kernel works on."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from meshwright.compat import capability, processors

Arg = tl.tensor
"""An argument of a kernel: inside it, a pointer or a number."""

ELEMENTS = 1024
"""Elements of one program of an elementwise kernel."""
ROW_ELEMENTS = 4096
"""Most elements of short rows that share a program."""
INTERPRETED_PROGRAMS = 4
"""Programs, in the interpreter, of a kernel that runs as many programs as the device runs at once."""
INTERPRETED_CAPABILITY = 90
"""Compute capability of the GPU whose tiles the interpreter uses."""


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def rows_of(x: Tensor) -> Tensor:
    """Return x (..., D) as rows (N, D) whose elements are contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def rows_a_program(width: int) -> int:
    """Return the rows of `width` padded elements that one program takes."""
    return max(1, min(16, ROW_ELEMENTS // width))


def warps(elements: int) -> int:
    """Return the warps for a program that holds so many elements: 8 to 32 each thread."""
    return max(1, min(32, power_of_two(elements // 512)))


def programs(x: Tensor, per_processor: int = 1) -> int:
    """Return into how many programs a kernel that sums over rows divides them.

    It depends on the device alone, so sums keep one order.
    """
    # The interpreter runs programs one by one: few are enough to test sums over several.
    if x.device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return per_processor * processors(x.device.index)


def has_warp_groups(x: Tensor) -> bool:
    """Return whether tensor cores multiply for four warps together, as from sm_90 on."""
    return (capability(x.device.index) if x.device.type == "cuda" else INTERPRETED_CAPABILITY) >= 90


def interpreted(kernel: Any) -> bool:
    """Return whether TRITON_INTERPRET=1 was set when the kernel was defined: numpy then runs it, on any device."""
    return type(kernel).__name__ == "InterpretedFunction"


def wide_products(kernel: Any, x: Tensor) -> bool:
    """Return whether operands of products must be widened to fp32: the interpreter multiplies no bf16."""
    return interpreted(kernel) and x.dtype == torch.bfloat16
