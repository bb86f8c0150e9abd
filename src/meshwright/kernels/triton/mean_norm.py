"""LayerNorm (Ba et al. 2016, arXiv:1607.06450), built as RMSNorm is (root_norm.py)."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, power_of_two, programs, rows_a_program, rows_of, warps
from meshwright.kernels.triton.part_sums import summed

REGISTERS = 65536
"""Registers of a multiprocessor since Volta.

A program that takes more than its share of them keeps the next one waiting until it is done.
"""


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
        normed = (values - mean) * scale  # outside, the gradient is 0
        weighted = incoming * factor.to(tl.float32)
        # one exchange between warps instead of two
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
        each = rows_a_program(block)
        mean_norm_forward[(ceil_div(rows, each),)](
            flat, flat.stride(0), weight, bias, out, means, scales, rows, width, eps, ROWS=each, BLOCK=block,
            num_warps=warps(each * block),
        )  # fmt: skip
        ctx.save_for_backward(flat, weight, means, scales)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, means, scales = ctx.saved_tensors
        incoming, (rows, width) = rows_of(gradient), x.shape
        block = power_of_two(width)
        each = max(1, rows_a_program(block) // 2)
        resident = max(1, min(4 if each == 1 else 2, 8192 // (each * block)))  # programs on a multiprocessor
        count = warps((2 if each == 1 else 4) * each * block)
        shared = min(ceil_div(rows, each), programs(x, each=resident))
        x_gradient = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        parts = torch.empty((shared, 2, width), dtype=torch.float32, device=x.device)
        mean_norm_backward[(shared,)](
            incoming, incoming.stride(0), x, x.stride(0), weight, means, scales, x_gradient, parts, rows, width,
            ROWS=each, BLOCK=block, STAGES=2 if block <= 8192 else 1, num_warps=count,
            maxnreg=min(255, REGISTERS // (32 * count * resident)),
        )  # fmt: skip
        of_weight, of_bias = summed(parts, weight.dtype).unbind()
        return x_gradient.view(gradient.shape), of_weight, of_bias, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalize as kernels.norm.layer_norm. x and two numbers a row are saved."""
    normed: Tensor = _MeanNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return normed
