"""Matrix products of a mixture of experts in one kernel, for GPUs where torch has a loop that waits for the counts.

Rows are sorted by expert. The grid is as large as it may be needed (each expert wastes less than one block of rows), so
the host never reads how many rows an expert has. A program finds its expert by the ends of the runs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, wide_products

ROWS, COLUMNS, INNER = 64, 128, 64
"""Size of a block of the result, and of what is summed over at a time."""


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
        gradient = gradient.contiguous()
        of_rows = _rows_product(gradient, weights, ends, transposed=False) if ctx.needs_input_grad[0] else None
        return of_rows, _weights_product(gradient, rows, weights, ends), None


def expert_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply as kernels.experts.expert_linear, for counts on the device."""
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
