"""RMSNorm, and the sum of two streams with its RMSNorm.

The backward pass is one kernel of as many programs as the device runs at once. Each takes groups of rows at a fixed
distance, and holds its part of the weight's gradient in registers. The parts are added in a fixed order afterwards.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, power_of_two, programs, rows_a_program, rows_of, warps
from meshwright.kernels.triton.part_sums import summed

SHORT = 8192
"""Longest row that a program of the backward pass holds in registers."""
FEWER_WARPS = 16
"""Warps for a longer row of the forward pass.

With 32 a thread has 32 registers, and code for sm_80 spills two.
"""


@triton.jit
def root_norm_forward(
    x: Arg, x_stride: Arg, added: Arg, added_stride: Arg, weight: Arg, out: Arg, total: Arg, scales: Arg, rows: Arg,
    width: Arg, eps: Arg, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute out = x / rms(x) * weight and 1 / rms(x). ADD: of total = x + added, rounded before the norm."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(added + row * added_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * width + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / width + eps)[:, None]
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (values * scale * factor).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def _reload(pointers: Arg, inside: Arg) -> Arg:
    return tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def root_norm_backward(
    gradient: Arg, gradient_stride: Arg, x: Arg, x_stride: Arg, weight: Arg, scales: Arg, sum_gradient: Arg,
    sum_gradient_stride: Arg, x_gradient: Arg, parts: Arg, rows: Arg, width: Arg, ADD: tl.constexpr,
    WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, AGAIN: tl.constexpr,
) -> None:  # fmt: skip
    """Compute, with s = 1/rms: dx = s g w - x s^3 / D sum(g w x), and this program's part of dw = sum of g x s.

    ADD: the gradient of the sum itself is added to dx.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    part = tl.zeros((1, BLOCK), tl.float32)
    for group in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (group * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)
        values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        incoming = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)  # from the cache
        along = scale * (tl.sum(incoming * factor * values, 1) / width)[:, None]
        if AGAIN:  # a long row and its part of the weight's gradient exceed the registers: read it from the cache again
            values = _reload(x + row * x_stride + column, inside)
            incoming = _reload(gradient + row * gradient_stride + column, inside)
            factor = _reload(weight + column, column < width)
        normed = values * scale
        row_gradient = scale * (incoming * factor - normed * along)
        if ADD:
            row_gradient += tl.load(sum_gradient + row * sum_gradient_stride + column, mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(x_gradient + row * width + column, row_gradient.to(x_gradient.dtype.element_ty), mask=inside)
        if WEIGHT:
            part += tl.sum(incoming * normed, 0)[None, :]
    if WEIGHT:
        tl.store(parts + program * width + column, part, mask=column < width)


def forward(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of x (N, D), the sum with `added` (x itself without it), and 1 / rms (N,) fp32."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    total = x if added is None else torch.empty((rows, width), dtype=x.dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = power_of_two(width)
    each = rows_a_program(block)
    root_norm_forward[(ceil_div(rows, each),)](
        x, x.stride(0), x if added is None else added, 0 if added is None else added.stride(0), weight, out, total,
        scales, rows, width, eps, ADD=added is not None, ROWS=each, BLOCK=block,
        num_warps=FEWER_WARPS if block > SHORT else warps(2 * each * block),
    )  # fmt: skip
    return out, total, scales


def backward(
    gradient: Tensor, x: Tensor, weight: Tensor, scales: Tensor, sum_gradient: Tensor | None, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x (N, D), with `sum_gradient` added, and of the weight (D,)."""
    rows, width = x.shape
    block = power_of_two(width)
    each, again = max(1, rows_a_program(block) // 2), block > SHORT
    shared = min(ceil_div(rows, each), programs(x, each=max(1, min(4, 8192 // (each * block)))))
    x_gradient = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    parts = torch.empty((shared, width) if wants_weight else (0,), dtype=torch.float32, device=x.device)
    added_gradient = gradient if sum_gradient is None else sum_gradient
    root_norm_backward[(shared,)](
        gradient, gradient.stride(0), x, x.stride(0), weight, scales, added_gradient,
        0 if sum_gradient is None else added_gradient.stride(0), x_gradient, parts, rows, width, ADD=sum_gradient is not
        None, WEIGHT=wants_weight, ROWS=each, BLOCK=block, STAGES=1 if again else 2, AGAIN=again,
        num_warps=warps(2 * each * block),
    )  # fmt: skip
    return x_gradient, summed(parts, weight.dtype) if wants_weight else None


class _RootNorm(torch.autograd.Function):
    """RMSNorm that saves x and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = rows_of(x)
        out, _, scales = forward(flat, None, weight, eps)
        ctx.save_for_backward(flat, weight, scales)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, scales = ctx.saved_tensors
        of_x, of_weight = backward(rows_of(gradient), x, weight, scales, None, ctx.needs_input_grad[1])
        return of_x.view(gradient.shape), of_weight, None


class _AddRootNorm(torch.autograd.Function):
    """Sum and RMSNorm that save the sum, which is an output anyway, and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, total, scales = forward(rows_of(x), rows_of(added), weight, eps)
        ctx.save_for_backward(total, weight, scales)
        return out.view(x.shape), total.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, beside: Tensor) -> Any:
        total, weight, scales = ctx.saved_tensors
        of_sum, of_weight = backward(rows_of(gradient), total, weight, scales, rows_of(beside), ctx.needs_input_grad[2])
        shaped = of_sum.view(gradient.shape)
        return shaped, shaped, of_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize as kernels.norm.rms_norm. Only x and one number a row are saved."""
    normed: Tensor = _RootNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return normed


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and normalize as kernels.norm.add_rms_norm."""
    both: tuple[Tensor, Tensor] = _AddRootNorm.apply(x, added, weight, eps)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return both
