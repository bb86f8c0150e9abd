"""Rows of tokens to their experts and back: copies gathered in one pass, and summed by their weights in one pass.

Each row is written by one program that looks up where its parts are, so nothing is added by atomics.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, power_of_two, rows_of

BLOCK = 2048
"""Elements of a row that a program copies at a time."""


@triton.jit
def gather_copies(
    x: Arg, x_stride: Arg, order: Arg, out: Arg, width: Arg, COPIES: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Compute out[i] = x[order[i] // COPIES]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(order + row) // COPIES
    elements = tl.load(x + source * x_stride + at, mask=at < width, other=0.0)
    tl.store(out + row * width + at, elements, mask=at < width)


@triton.jit
def sum_copies(
    rows: Arg, rows_stride: Arg, inverse: Arg, weights: Arg, out: Arg, width: Arg, WEIGHTS: tl.constexpr,
    COPIES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute out[n] = sum over copies j of weights[n, j] rows[inverse[n COPIES + j]], in that order, in fp32."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for copy in tl.static_range(COPIES):
        source = tl.load(inverse + token * COPIES + copy)
        part = tl.load(rows + source * rows_stride + at, mask=at < width, other=0.0).to(tl.float32)
        if WEIGHTS:
            part *= tl.load(weights + token * COPIES + copy).to(tl.float32)
        total += part
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def combine_backward(
    gradient: Arg, gradient_stride: Arg, rows: Arg, rows_stride: Arg, inverse: Arg, weights: Arg, rows_gradient: Arg,
    weights_gradient: Arg, width: Arg, COPIES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the gradients of sum_copies.

    For each copy's row weights[n, j] gradient[n], for its weight the product of both rows.
    """
    copy = tl.program_id(0).to(tl.int64)
    token = copy // COPIES
    source = tl.load(inverse + copy)
    weight = tl.load(weights + copy).to(tl.float32)
    total = 0.0
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        incoming = tl.load(gradient + token * gradient_stride + at, mask=at < width, other=0.0).to(tl.float32)
        part = tl.load(rows + source * rows_stride + at, mask=at < width, other=0.0).to(tl.float32)
        row_gradient = (incoming * weight).to(rows_gradient.dtype.element_ty)
        tl.store(rows_gradient + source * width + at, row_gradient, mask=at < width)
        total += tl.sum(incoming * part, 0)
    tl.store(weights_gradient + copy, total)


def _grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    block = min(BLOCK, power_of_two(width))
    return (rows, ceil_div(width, block)), block


def copies(x: Tensor, order: Tensor, k: int) -> Tensor:
    """Return x[order // k] (N k, D) of x (N, D)."""
    out = torch.empty((len(order), x.shape[1]), dtype=x.dtype, device=x.device)
    grid, block = _grid(*out.shape)
    gather_copies[grid](x, x.stride(0), order, out, x.shape[1], COPIES=k, BLOCK=block, num_warps=4)
    return out


def summed(rows: Tensor, inverse: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """Sum the k copies of each token, rows (N k, D), times weights (N, k) if any. Returns (N, D)."""
    out = torch.empty((len(inverse) // k, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    grid, block = _grid(*out.shape)
    sum_copies[grid](
        rows, rows.stride(0), inverse, rows if weights is None else weights.contiguous(), out, rows.shape[1],
        WEIGHTS=weights is not None, COPIES=k, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return copies(rows_of(x), order, k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return summed(rows_of(gradient), inverse, None, ctx.k), None, None, None


class _Combined(torch.autograd.Function):
    """Weighted sum that saves the rows and their weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
        rows = rows_of(rows)
        ctx.save_for_backward(rows, weights, inverse)
        return summed(rows, inverse, weights, weights.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weights, inverse = ctx.saved_tensors
        incoming, weights = rows_of(gradient), weights.contiguous()
        of_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        of_weights = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
        width = rows.shape[1]
        combine_backward[(len(inverse),)](
            incoming, incoming.stride(0), rows, rows.stride(0), inverse, weights, of_rows, of_weights, width,
            COPIES=weights.shape[1], BLOCK=min(BLOCK, power_of_two(width)), num_warps=4,
        )  # fmt: skip
        return of_rows, of_weights, None


def spread(x: Tensor, order: Tensor, inverse: Tensor, k: int = 1) -> Tensor:
    """Copy rows as kernels.experts.spread."""
    rows: Tensor = _Copies.apply(x, order, inverse, k)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return rows


def combine(rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """Combine rows as kernels.experts.combine."""
    tokens: Tensor = _Combined.apply(rows, weights, inverse)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return tokens
