"""RMSNorm, the sum of two streams with its RMSNorm, and LayerNorm (Ba et al. 2016, arXiv:1607.06450).

The backward pass is one kernel of as many programs as the device runs at once. Each takes groups of rows at a fixed
distance, and holds its part of the weight's gradient in registers. The parts are added in a fixed order afterwards.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, power_of_two, programs, rows_a_program, rows_of, warps

PARTS, COLUMNS = 512, 16
"""Tile of parts that are summed: rows of 64 bytes, in as many programs as there are such columns."""
SHORT = 8192
"""Longest row that a program of the backward pass holds in registers."""
FEWER_WARPS = 16
"""Warps for a longer row of the forward pass.

With 32 a thread has 32 registers, and code for sm_80 spills two.
"""
REGISTERS = 65536
"""Registers of a multiprocessor since Volta.

A program that takes more than its share of them keeps the next one waiting until it is done.
"""


@triton.jit
def sum_parts(parts: Arg, out: Arg, number: Arg, width: Arg, PARTS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
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
    sum_parts[(ceil_div(width, COLUMNS),)](parts, out, len(parts), width, PARTS=PARTS, COLUMNS=COLUMNS, num_warps=8)
    return out


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
        # The norm is that of the rounded sum, which the residual stream carries on.
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
        # Read for each group: the cache has it, and registers are short.
        factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        along = scale * (tl.sum(incoming * factor * values, 1) / width)[:, None]
        # A long row and its part of the weight's gradient exceed the registers: the cache has the row.
        if AGAIN:
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
    rows_per_program = rows_a_program(block)
    root_norm_forward[(ceil_div(rows, rows_per_program),)](
        x, x.stride(0), x if added is None else added, 0 if added is None else added.stride(0), weight, out, total,
        scales, rows, width, eps, ADD=added is not None, ROWS=rows_per_program, BLOCK=block,
        num_warps=FEWER_WARPS if block > SHORT else warps(2 * rows_per_program * block),
    )  # fmt: skip
    return out, total, scales


def backward(
    gradient: Tensor, x: Tensor, weight: Tensor, scales: Tensor, sum_gradient: Tensor | None, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x (N, D), with `sum_gradient` added, and of the weight (D,)."""
    rows, width = x.shape
    block = power_of_two(width)
    rows_per_program, again = max(1, rows_a_program(block) // 2), block > SHORT
    shared = min(
        ceil_div(rows, rows_per_program), programs(x, per_processor=max(1, min(4, 8192 // (rows_per_program * block))))
    )
    x_gradient = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    parts = torch.empty((shared, width) if wants_weight else (0,), dtype=torch.float32, device=x.device)
    added_gradient = gradient if sum_gradient is None else sum_gradient
    root_norm_backward[(shared,)](
        gradient, gradient.stride(0), x, x.stride(0), weight, scales, added_gradient,
        0 if sum_gradient is None else added_gradient.stride(0), x_gradient, parts, rows, width, ADD=sum_gradient is not
        None, WEIGHT=wants_weight, ROWS=rows_per_program, BLOCK=block, STAGES=1 if again else 2, AGAIN=again,
        num_warps=warps(2 * rows_per_program * block),
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
    """Normalize as kernels.norm.norms.rms_norm. Only x and one number a row are saved."""
    normed: Tensor = _RootNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return normed


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and normalize as kernels.norm.norms.add_rms_norm."""
    normed_and_sum: tuple[Tensor, Tensor] = _AddRootNorm.apply(x, added, weight, eps)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return normed_and_sum


@triton.jit
def mean_norm_forward(
    x: Arg, x_stride: Arg, weight: Arg, bias: Arg, out: Arg, means: Arg, scales: Arg, rows: Arg, width: Arg, eps: Arg,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute out = (x - mean) / std * weight + bias, and mean and 1 / std of each row."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    mean = (tl.sum(values, 1) / width)[:, None]
    # Centered before it is squared: mean(x^2) - mean^2 would cancel. Masked zeros less the mean are no zeros.
    centered = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 1) / width + eps)[:, None]
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    added = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    normed = centered * scale * factor + added
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=inside)
    tl.store(means + row, mean, mask=row < rows)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def _both_sums(a: Arg, b: Arg, c: Arg, d: Arg) -> tuple[Arg, Arg]:
    return a + c, b + d


@triton.jit
def mean_norm_backward(
    gradient: Arg, gradient_stride: Arg, x: Arg, x_stride: Arg, weight: Arg, means: Arg, scales: Arg, x_gradient: Arg,
    parts: Arg, rows: Arg, width: Arg, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Compute, with n = (x - mean) s: dx = s (g w - mean(g w) - n mean(g w n)).

    Also this program's parts of dw = sum of g n and db = sum of g, (2, D).
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    factor = tl.load(weight + column, mask=column < width, other=0.0)
    of_weight = tl.zeros((1, BLOCK), tl.float32)
    of_bias = tl.zeros((1, BLOCK), tl.float32)
    for group in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (group * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)
        values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        incoming = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        # Not 0 past the end of a row, but the gradient is 0 there.
        normed = (values - mean) * scale
        weighted = incoming * factor.to(tl.float32)
        # Both sums in one reduction: one exchange between warps instead of two.
        mean_weighted, along = tl.reduce((weighted, weighted * normed), 1, _both_sums)
        mean_weighted, along = (mean_weighted / width)[:, None], (along / width)[:, None]
        row_gradient = scale * (weighted - mean_weighted - normed * along)
        tl.store(x_gradient + row * width + column, row_gradient.to(x_gradient.dtype.element_ty), mask=inside)
        of_weight += tl.sum(incoming * normed, 0)[None, :]
        of_bias += tl.sum(incoming, 0)[None, :]
    at = parts + program * 2 * width + column
    tl.store(at, of_weight, mask=column < width)
    tl.store(at + width, of_bias, mask=column < width)


class _MeanNorm(torch.autograd.Function):
    """LayerNorm that saves x and two numbers a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        flat = rows_of(x)
        rows, width = flat.shape
        out = torch.empty((rows, width), dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
        means, scales = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        block = power_of_two(width)
        rows_per_program = rows_a_program(block)
        mean_norm_forward[(ceil_div(rows, rows_per_program),)](
            flat, flat.stride(0), weight, bias, out, means, scales, rows, width, eps, ROWS=rows_per_program,
            BLOCK=block, num_warps=warps(rows_per_program * block),
        )  # fmt: skip
        ctx.save_for_backward(flat, weight, means, scales)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, means, scales = ctx.saved_tensors
        incoming, (rows, width) = rows_of(gradient), x.shape
        block = power_of_two(width)
        rows_per_program = max(1, rows_a_program(block) // 2)
        resident = max(
            1, min(4 if rows_per_program == 1 else 2, 8192 // (rows_per_program * block))
        )  # programs on a multiprocessor
        count = warps((2 if rows_per_program == 1 else 4) * rows_per_program * block)
        shared = min(ceil_div(rows, rows_per_program), programs(x, per_processor=resident))
        x_gradient = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        parts = torch.empty((shared, 2, width), dtype=torch.float32, device=x.device)
        mean_norm_backward[(shared,)](
            incoming, incoming.stride(0), x, x.stride(0), weight, means, scales, x_gradient, parts, rows, width,
            ROWS=rows_per_program, BLOCK=block, STAGES=2 if block <= 8192 else 1, num_warps=count,
            maxnreg=min(255, REGISTERS // (32 * count * resident)),
        )  # fmt: skip
        of_weight, of_bias = summed(parts, weight.dtype).unbind()
        return x_gradient.view(gradient.shape), of_weight, of_bias, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalize as kernels.norm.norms.layer_norm. x and two numbers a row are saved."""
    normed: Tensor = _MeanNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return normed
