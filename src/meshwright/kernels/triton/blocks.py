"""Sizes of the pieces that one program of a kernel works on."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.compat import processors

Arg = tl.tensor
"""An argument of a kernel: in it, a pointer or a number."""

ELEMENTS = 1024
"""Of one program of an elementwise kernel."""
ROW_ELEMENTS = 4096
"""Up to which several short rows share a program."""
INTERPRETED_PROGRAMS = 4
"""Of a kernel that divides its rows among as many programs as the device runs at once."""


def power_of_two(number: int) -> int:
    """The least power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def rows_of(x: Tensor) -> Tensor:
    """x (..., D) as rows (N, D) whose elements lie side by side."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def rows_a_program(width: int) -> int:
    """Rows of `width` padded elements that one program takes."""
    return max(1, min(16, ROW_ELEMENTS // width))


def warps(elements: int) -> int:
    """Warps for a program that holds so many elements: 8 to 32 each thread."""
    return max(1, min(32, power_of_two(elements // 512)))


def programs(x: Tensor, each: int = 1) -> int:
    """How many programs share the rows of a kernel that sums over them: `each` a multiprocessor. Fixed for a device, so
    that sums have one order."""
    if x.device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return each * processors(x.device.index)


PARTS, COLUMNS = 512, 16
"""Of a tile of parts that are summed: rows of 64 bytes, in as many programs as there are such columns."""


@triton.jit
def sum_parts(
    parts: Arg, out: Arg, number: Arg, width: Arg, PARTS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:  # fmt: skip
    """The sums over rows of parts (number, width), rounded once."""
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros((PARTS, COLUMNS), tl.float32)
    for start in range(0, number, PARTS):
        row = start + tl.arange(0, PARTS)[:, None]
        total += tl.load(parts + row * width + column, mask=(row < number) & (column < width), other=0.0)
    found = tl.sum(total, 0)[None, :]
    tl.store(out + column, found.to(out.dtype.element_ty), mask=column < width)


def summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Parts (P, ...) fp32 that programs of a kernel have made -> their sum (...) in `dtype`, in a fixed order. One
    kernel: torch's sum over the first dim has few programs, and rounding is a pass of its own."""
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    width = out.numel()
    sum_parts[(ceil_div(width, COLUMNS),)](
        parts, out, len(parts), width, PARTS=PARTS, COLUMNS=COLUMNS, num_warps=8
    )  # fmt: skip
    return out


def interpreted(kernel: Any) -> bool:
    """Whether TRITON_INTERPRET=1 was set when the kernel was defined: numpy then runs it, on any device."""
    return type(kernel).__name__ == "InterpretedFunction"


def wide_products(kernel: Any, x: Tensor) -> bool:
    """Whether operands of matrix products must become fp32 first: the interpreter multiplies no bf16."""
    return interpreted(kernel) and x.dtype == torch.bfloat16
