"""Rounding to 8 bits: rows, with a scale each, in one kernel; columns in two, which also transpose them.

A row is read twice, the second time from the cache. Columns are read twice from memory. First for their largest
numbers, by runs of rows, which lets more programs share the work than there are blocks of columns. Then in square
blocks, which are written transposed. Scales of e4m3 are powers of two (kernels/linear/fp8.py), so scaling rounds
nothing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, power_of_two, programs, rows_of
from meshwright.kernels.triton.code_words import e4m3_code, e4m3_number

BLOCK = 4096
"""Elements of a row that are rounded at a time."""
SIDE, RUN_ROWS, MOST_RUNS = 64, 32, 64
"""Columns of a block and rows transposed at a time; rows read at a time for the maxima; most runs of rows."""


class NarrowRows(NamedTuple):
    """x (M, K) as codes and scales."""

    codes: Tensor
    """(M, K) int8 or e4m3, or the numbers of e4m3 in 16 bits."""
    scales: Tensor
    """(M, 1) fp32."""


@triton.jit
def _power(most: Arg) -> Arg:
    """Return the power of two that brings the largest number just below 448, fp32, from the exponent alone."""
    bits = tl.div_rn(448.0, tl.maximum(most, 1e-12)).to(tl.int32, bitcast=True)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def round_rows(
    x: Arg, x_stride: Arg, left_out: Arg, codes: Arg, scales: Arg, width: Arg, SKIPS: tl.constexpr,
    WHOLE: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a scale for each row of x (M, K), and its codes.

    WHOLE: integers within -127 .. 127, absmax. Else e4m3, scaled by the power of two that brings the largest number
    just below 448, as codes or as the NUMBERS that they represent. SKIPS: where `left_out` (K,) is not 0, codes are 0.
    """
    row = tl.program_id(0).to(tl.int64)
    # `maximum` can be told to keep NaN, `tl.max` not: NaN of a block is looked for by itself.
    peak = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        numbers = tl.load(x + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
        if SKIPS:
            numbers = tl.where(tl.load(left_out + at, mask=at < width, other=1) != 0, 0.0, numbers)
        peak = tl.maximum(peak, tl.abs(numbers), propagate_nan=tl.PropagateNan.ALL)
    largest, has_nan = tl.max(peak, 0), tl.max((peak != peak).to(tl.int32), 0)
    if WHOLE:
        scale = tl.div_rn(largest, 127.0)
        scale = tl.where(scale == 0.0, 1.0, scale)
    else:
        scale = tl.div_rn(1.0, _power(largest))
    scale = tl.where(has_nan > 0, float("nan"), scale)
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        numbers = tl.load(x + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
        if SKIPS:
            numbers = tl.where(tl.load(left_out + at, mask=at < width, other=1) != 0, 0.0, numbers)
        # The scale alone marks a row with infinities or NaN. Its codes need only be finite.
        scaled = tl.div_rn(numbers, tl.where(scale < float("inf"), scale, 1.0))
        here = codes + row * width + at
        if WHOLE:
            # Adding 1.5 x 2^23 leaves fp32 no bits for fractions, so the sum is rounded, halves to even.
            rounded = (scaled + 12582912.0) - 12582912.0
            scaled = tl.where(rounded == rounded, tl.minimum(tl.maximum(rounded, -127.0), 127.0), 0.0)
            tl.store(here, scaled.to(tl.int8), mask=at < width)
        elif NUMBERS:
            number = e4m3_number(e4m3_code(scaled).to(tl.int32), 0)
            tl.store(here, number.to(codes.dtype.element_ty), mask=at < width)
        else:
            tl.store(here, e4m3_code(scaled), mask=at < width)


@triton.jit
def column_peaks(
    x: Arg, matrix_stride: Arg, row_stride: Arg, peaks: Arg, rows: Arg, columns: Arg, each: Arg, runs: Arg,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the largest magnitudes (matrices, runs, C) fp32 of the columns of x (matrices, N, C).

    Runs have `each` rows. NaN where one of x is NaN.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    run, matrix = tl.program_id(1), tl.program_id(2).to(tl.int64)
    peak = tl.zeros((ROWS, COLUMNS), tl.float32)
    end = tl.minimum(run * each + each, rows)
    for start in range(run * each, end, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (column < columns)[None, :]
        at = x + matrix * matrix_stride + row[:, None].to(tl.int64) * row_stride + column[None, :]
        number = tl.abs(tl.load(at, mask=mask, other=0.0).to(tl.float32))
        peak = tl.maximum(peak, number, propagate_nan=tl.PropagateNan.ALL)
    has_nan = tl.max((peak != peak).to(tl.int32), 0) > 0
    largest = tl.where(has_nan, float("nan"), tl.max(peak, 0))
    tl.store(peaks + (matrix * runs + run) * columns + column, largest, mask=column < columns)


@triton.jit
def turn_columns(
    x: Arg, matrix_stride: Arg, row_stride: Arg, peaks: Arg, places: Arg, codes: Arg, scales: Arg, rows: Arg,
    columns: Arg, length: Arg, runs: Arg, PLACED: tl.constexpr, RUNS: tl.constexpr, SIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Compute codes e4m3 (matrices, C, length) of x (matrices, N, C), and scales (matrices, C).

    PLACED: row n goes to position places[n], and the rest of `codes` stays. Else positions from N to length become
    zeros.
    """
    column = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    row = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    matrix = tl.program_id(2).to(tl.int64)
    inside = column < columns
    run = tl.arange(0, RUNS)
    at = peaks + (matrix * runs + run[:, None]) * columns + column[None, :]
    peak = tl.load(at, mask=(run < runs)[:, None] & inside[None, :], other=0.0)
    has_nan = tl.max((peak != peak).to(tl.int32), 0) > 0
    power = _power(tl.max(peak, 0))
    scale = tl.where(has_nan, float("nan"), tl.div_rn(1.0, power))
    # All blocks of rows have the same scale, and one of them writes it.
    if tl.program_id(1) == 0:
        tl.store(scales + matrix * columns + column, scale, mask=inside)
    at = x + matrix * matrix_stride + row[:, None].to(tl.int64) * row_stride + column[None, :]
    number = tl.load(at, mask=(row < rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    code = e4m3_code(number * tl.where(has_nan, 1.0, power)[None, :])
    position, written = row, row < length
    if PLACED:
        position, written = tl.load(places + row, mask=row < rows, other=0), row < rows
    line = codes + (matrix * columns + column.to(tl.int64)[:, None]) * length
    tl.store(line + position[None, :], tl.trans(code), mask=inside[:, None] & written[None, :])


def rounded(x: Tensor, dtype: torch.dtype, left_out: Tensor | None = None) -> NarrowRows:
    """Round x (M, K) to int8, to e4m3, or, with the dtype of x, to the numbers that e4m3 has for it.

    `left_out` (K,) uint8: columns that are not 0 there count as zeros.
    """
    x = rows_of(x)
    rows, width = x.shape
    codes = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = min(BLOCK, power_of_two(width))
    round_rows[(rows,)](
        x, x.stride(0), x if left_out is None else left_out,
        codes.view(torch.uint8) if dtype == torch.float8_e4m3fn else codes, scales, width, SKIPS=left_out is not None,
        WHOLE=dtype == torch.int8, NUMBERS=dtype == x.dtype, BLOCK=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return NarrowRows(codes, scales)


def turned(x: Tensor, length: int, places: Tensor | None = None) -> NarrowRows:
    """Round and transpose x (..., N, C), C contiguous, to e4m3 (..., C, length) and scales (..., C, 1).

    Zeros follow the N of a column; or `places` (N,) int64 says where each row goes, and zeros are everywhere else.
    """
    *stack, rows, columns = x.shape
    matrices = x.unsqueeze(0) if x.dim() == 2 else x.flatten(0, -3)
    matrices = matrices if matrices.stride(-1) == 1 or columns == 1 else matrices.contiguous()
    make = torch.empty if places is None else torch.zeros
    codes = make((*stack, columns, length), dtype=torch.uint8, device=x.device)
    scales = torch.empty((*stack, columns, 1), dtype=torch.float32, device=x.device)
    blocks, count = ceil_div(columns, SIDE), len(matrices)
    # Some four programs a processor, each of which has rows enough to read on.
    wanted = max(1, min(MOST_RUNS, 4 * programs(x) // max(1, blocks * count), ceil_div(rows, RUN_ROWS)))
    run_rows = ceil_div(ceil_div(max(1, rows), wanted), RUN_ROWS) * RUN_ROWS
    runs = ceil_div(max(1, rows), run_rows)
    peaks = torch.empty((count, runs, columns), dtype=torch.float32, device=x.device)
    column_peaks[(blocks, runs, count)](
        matrices, matrices.stride(0), matrices.stride(1), peaks, rows, columns, run_rows, runs, ROWS=RUN_ROWS,
        COLUMNS=SIDE, num_warps=4,
    )  # fmt: skip
    turn_columns[(blocks, ceil_div(max(1, rows if places is not None else length), SIDE), count)](
        matrices, matrices.stride(0), matrices.stride(1), peaks, peaks if places is None else places, codes, scales,
        rows, columns, length, runs, PLACED=places is not None, RUNS=power_of_two(runs), SIDE=SIDE, num_warps=4,
    )  # fmt: skip
    return NarrowRows(codes.view(torch.float8_e4m3fn), scales)
