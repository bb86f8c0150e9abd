"""Rows of tokens to their experts and back: copies, sums by weights, and the products of all experts in one kernel.

Each row is written by one program that looks up where its parts are, so nothing is added by atomics. For products, rows
are sorted by expert. The grid is as large as it may be needed (each expert wastes less than one block of rows), so the
host never reads how many rows an expert has. A program finds its expert by the ends of the runs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, power_of_two, rows_of, wide_products

BLOCK = 2048
"""Elements of a row that a program copies at a time."""
ROWS, COLUMNS, INNER = 64, 128, 64
"""Size of a block of the result, and of what is summed over at a time."""


@triton.jit
def gather_copies(
    x: Arg, x_stride: Arg, order: Arg, out: Arg, width: Arg, COPIES: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Compute out[i] = x[order[i] // COPIES]."""
    # Copies of all tokens times their width pass 2^31 numbers.
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
    # One program has the whole row, so the weight's gradient needs neither atomics nor parts.
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
    """Copy rows as kernels.experts.experts.spread."""
    rows: Tensor = _Copies.apply(x, order, inverse, k)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return rows


def combine(rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """Combine rows as kernels.experts.experts.combine."""
    tokens: Tensor = _Combined.apply(rows, weights, inverse)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return tokens


@triton.jit
def grouped_rows(
    rows: Arg, rows_stride: Arg, weights: Arg, expert_stride: Arg, out_stride: Arg, in_stride: Arg, ends: Arg, out: Arg,
    experts: Arg, columns: Arg, inner: Arg, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
) -> None:  # fmt: skip
    """Compute out (N, O) = rows (N, I) times the matrix of each row's expert.

    Element (o, i) of a matrix lies at o out_stride + i in_stride.
    """
    block = tl.program_id(0)
    expert = block * 0
    first, end, blocks_before = 0, 0, 0
    # The host does not know the runs, so each program walks over their ends to find its block.
    for candidate in range(experts):
        stop = tl.load(ends + candidate)
        start = tl.load(ends + candidate - 1, mask=candidate > 0, other=0)
        blocks = tl.cdiv(stop - start, ROWS)
        here = (block >= blocks_before) & (block < blocks_before + blocks)
        expert = tl.where(here, candidate, expert)
        first = tl.where(here, start + (block - blocks_before) * ROWS, first)
        end = tl.where(here, stop, end)
        blocks_before += blocks
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if first < end:
        for start in range(0, inner, INNER):
            at = start + tl.arange(0, INNER)
            mask = (row[:, None] < end) & (at[None, :] < inner)
            left = tl.load(rows + row[:, None].to(tl.int64) * rows_stride + at[None, :], mask=mask, other=0.0)
            matrix = weights + expert.to(tl.int64) * expert_stride
            mask = (at[:, None] < inner) & (column[None, :] < columns)
            right = tl.load(matrix + at[:, None] * in_stride + column[None, :] * out_stride, mask=mask, other=0.0)
            if WIDE:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total += tl.dot(left, right, input_precision="ieee")
        mask = (row[:, None] < end) & (column[None, :] < columns)
        at = out + row[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def grouped_weights(
    gradient: Arg, gradient_stride: Arg, rows: Arg, rows_stride: Arg, ends: Arg, out: Arg, columns: Arg, inner: Arg,
    WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    """Compute out (X, O, I) = for each expert gradient^T (O, R) rows (R, I). Zeros for an expert without rows."""
    expert = tl.program_id(2)
    # A run without rows passes the loop, and zeros are written: nobody else clears the result.
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, INNER):
        row = (start + tl.arange(0, INNER)).to(tl.int64)
        mask = (row[None, :] < end) & (o[:, None] < columns)
        left = tl.load(gradient + row[None, :] * gradient_stride + o[:, None], mask=mask, other=0.0)
        mask = (row[:, None] < end) & (i[None, :] < inner)
        right = tl.load(rows + row[:, None] * rows_stride + i[None, :], mask=mask, other=0.0)
        if WIDE:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total += tl.dot(left, right, input_precision="ieee")
    at = out + (expert.to(tl.int64) * columns + o[:, None]) * inner + i[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(o[:, None] < columns) & (i[None, :] < inner))


def _rows_product(rows: Tensor, weights: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
    """Multiply rows (N, I) by weights (X, O, I) transposed, or rows (N, O) by weights as they are."""
    experts, out_width, in_width = weights.shape
    columns, inner = (out_width, in_width) if transposed else (in_width, out_width)
    strides = (weights.stride(1), weights.stride(2)) if transposed else (weights.stride(2), weights.stride(1))
    out = torch.empty((len(rows), columns), dtype=rows.dtype, device=rows.device)
    # Each expert wastes less than a block, so this grid is large enough without the counts.
    grouped_rows[(ceil_div(len(rows), ROWS) + experts, ceil_div(columns, COLUMNS))](
        rows, rows.stride(0), weights, weights.stride(0), *strides, ends, out, experts, columns, inner,
        WIDE=wide_products(grouped_rows, rows), ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def _weights_product(gradient: Tensor, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return for each expert gradient^T (O, R) rows (R, I): (X, O, I) like the weights."""
    experts, columns, inner = weights.shape
    out = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    grouped_weights[(ceil_div(columns, ROWS), ceil_div(inner, COLUMNS), experts)](
        gradient, gradient.stride(0), rows, rows.stride(0), ends, out, columns, inner,
        WIDE=wide_products(grouped_weights, rows), ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return out


class _Grouped(torch.autograd.Function):
    """Grouped product that saves rows and weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        ctx.save_for_backward(rows, weights, ends)
        return _rows_product(rows, weights, ends, transposed=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weights, ends = ctx.saved_tensors
        # The kernels take the stride of rows alone. A gradient may be expanded, with a stride of 0.
        gradient = gradient.contiguous()
        of_rows = _rows_product(gradient, weights, ends, transposed=False) if ctx.needs_input_grad[0] else None
        return of_rows, _weights_product(gradient, rows, weights, ends), None


def expert_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply as kernels.experts.experts.expert_linear, for counts on the device."""
    ends = counts.cumsum(0, dtype=torch.int32)
    product: Tensor = _Grouped.apply(rows, weights, ends)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return product


def gradients(
    gradient: Tensor, rows: Tensor, weights: Tensor, counts: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return functions that compute the gradients of rows and weights from that of expert_linear's result."""
    gradient, rows = gradient.contiguous(), rows if rows.stride(-1) == 1 else rows.contiguous()
    ends = counts.cumsum(0, dtype=torch.int32)
    rows_gradient = partial(_rows_product, gradient, weights, ends, transposed=False)
    return rows_gradient, partial(_weights_product, gradient, rows, weights, ends)
