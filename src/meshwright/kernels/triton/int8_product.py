"""Products of 8-bit integers with their scales, outliers and bias, for rows that row_rounding.py has rounded.

    y (M, N) = (Qx Qw^T) sx sw + x_O W_O^T + bias        Qx (M, K), Qw (N, K) int8, sums in int32: exact

Columns O of x are left out of Qx and multiplied in 16 bits, after the sum of the others. Where columns of the result
are too few programs for the device, K is cut, too. The parts are integers, so the cut changes no bit.
"""

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, interpreted, power_of_two, programs, rows_of, wide_products
from meshwright.kernels.triton.packed_product import LEAST_WORDS, MOST_ROWS, ProgramTile, parts_of
from meshwright.kernels.triton.row_rounding import NarrowRows

OUTLIER_BLOCK = 32
"""Outlier columns that are multiplied at a time."""
ALONGSIDE = 8
"""Blocks of rows whose programs run side by side, and share blocks of the matrix in the cache."""

FEW_COLUMNS, FEW_WORDS, FEW_WARPS, FINISHED_ROWS = 16, 128, 8, 16
"""Tile and warps of a program for few rows: two outputs and four words a thread.

FINISHED_ROWS: least rows of a product of tensor cores, with which outliers are multiplied.
"""


class Int8Matrix(NamedTuple):
    """W (N, K)."""

    codes: Tensor
    """(N, K) int8."""
    scales: Tensor
    """(N, 1)."""
    columns: Tensor | None = None
    """Columns left out of the codes, (O,)."""
    outlier_weights: Tensor | None = None
    """Weights of these columns, (N, O)."""


@triton.jit
def _scaled_sums(
    total: Arg, row: Arg, column: Arg, rows: Arg, columns: Arg, x: Arg, x_stride: Arg, x_scales: Arg, scales: Arg,
    outlier_columns: Arg, outlier_weights: Arg, outliers: Arg, bias: Arg, HAS_OUTLIERS: tl.constexpr,
    BIAS: tl.constexpr, WIDE: tl.constexpr, OUTLIER_BLOCK: tl.constexpr,
) -> Arg:  # fmt: skip
    """Turn exact sums (COLUMNS, ROWS) int32 into y transposed, fp32."""
    column_exists, row_exists = column < columns, row < rows
    # The sums are exact, so this is the first rounding, in one order for every tile.
    right = tl.load(scales + column, mask=column_exists, other=0.0).to(tl.float32)
    scaled = total.to(tl.float32) * right[:, None] * tl.load(x_scales + row, mask=row_exists, other=0.0)[None, :]
    if HAS_OUTLIERS:
        for start in range(0, outliers, OUTLIER_BLOCK):
            at = start + tl.arange(0, OUTLIER_BLOCK)
            inside = at < outliers
            input_column = tl.load(outlier_columns + at, mask=inside, other=0).to(tl.int64)
            left = x + row[None, :].to(tl.int64) * x_stride + input_column[:, None]
            inputs = tl.load(left, mask=inside[:, None] & row_exists[None, :], other=0.0)
            weight_at = outlier_weights + column[:, None].to(tl.int64) * outliers + at[None, :]
            weight = tl.load(weight_at, mask=column_exists[:, None] & inside[None, :], other=0.0).to(inputs.dtype)
            if WIDE:
                inputs, weight = inputs.to(tl.float32), weight.to(tl.float32)
            scaled = tl.dot(weight, inputs, scaled, input_precision="ieee")
    if BIAS:
        scaled += tl.load(bias + column, mask=column_exists, other=0.0).to(tl.float32)[:, None]
    return scaled


@triton.jit
def int8_rows(
    x_codes: Arg, codes: Arg, x: Arg, x_stride: Arg, x_scales: Arg, scales: Arg, outlier_columns: Arg,
    outlier_weights: Arg, outliers: Arg, bias: Arg, out: Arg, rows: Arg, columns: Arg, inner: Arg, each: Arg,
    HAS_OUTLIERS: tl.constexpr, BIAS: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr, OUTLIER_BLOCK: tl.constexpr,
    ALONGSIDE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one block of y (M, N), or PART: of the sum over one run of `each` inputs, int32."""
    blocks, across = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    # Programs go down ALONGSIDE blocks of rows before the next block of columns: they share it in the cache.
    first = (tl.program_id(0) // (ALONGSIDE * blocks)) * ALONGSIDE
    beside = tl.minimum(across - first, ALONGSIDE)
    number = tl.program_id(0) % (ALONGSIDE * blocks)
    row = (first + number % beside) * ROWS + tl.arange(0, ROWS)
    column = (number // beside) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    column_exists, row_exists = column < columns, row < rows
    column_index, row_index = column.to(tl.int64), row.to(tl.int64)
    # 127 x 127 x K passes 2^31 from 133,000 inputs on, more than any layer has.
    total = tl.zeros((COLUMNS, ROWS), tl.int32)
    for start in range(part * each, tl.minimum(part * each + each, inner), INNER):
        at = start + tl.arange(0, INNER)
        mask = column_exists[:, None] & (at[None, :] < inner)
        weight = tl.load(codes + column_index[:, None] * inner + at[None, :], mask=mask, other=0)
        mask = (at[:, None] < inner) & row_exists[None, :]
        inputs = tl.load(x_codes + row_index[None, :] * inner + at[:, None], mask=mask, other=0)
        total = tl.dot(weight, inputs, total, out_dtype=tl.int32)
    mask = column_exists[:, None] & row_exists[None, :]
    if PART:
        tl.store(
            out + (part.to(tl.int64) * rows + row_index[None, :]) * columns + column_index[:, None], total, mask=mask
        )
    else:
        scaled = _scaled_sums(
            total, row, column, rows, columns, x, x_stride, x_scales, scales, outlier_columns, outlier_weights,
            outliers, bias, HAS_OUTLIERS, BIAS, WIDE, OUTLIER_BLOCK,
        )  # fmt: skip
        tl.store(out + row_index[None, :] * columns + column_index[:, None], scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _four_products(words: Arg, inputs: Arg, total: Arg, INTERPRETED: tl.constexpr) -> Arg:
    """Add the products of four 8-bit numbers of each word to total; one instruction of a GPU."""
    if INTERPRETED:
        for byte in tl.static_range(4):
            total += ((words << (24 - 8 * byte)) >> 24) * ((inputs << (24 - 8 * byte)) >> 24)
    else:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [words, inputs, total], dtype=tl.int32, is_pure=True, pack=1
        )
    return total


@triton.jit
def few_int8_rows(
    x_words: Arg, codes: Arg, x: Arg, x_stride: Arg, x_scales: Arg, scales: Arg, outlier_columns: Arg,
    outlier_weights: Arg, outliers: Arg, bias: Arg, out: Arg, rows: Arg, columns: Arg, words: Arg,
    HAS_OUTLIERS: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr,
    OUTLIER_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute COLUMNS outputs of one or two rows, from codes read as words of four.

    WORDS divides the words of a row. The result is scaled in a block of ROWS rows, most of them empty, as in a larger
    product: to the same bit.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Columns past the end read the last one again, and are not written.
    line = tl.minimum(column, columns - 1).to(tl.int64)
    word = tl.arange(0, WORDS)
    first = tl.zeros((COLUMNS, WORDS), tl.int32)
    second = tl.zeros((COLUMNS, WORDS), tl.int32)
    # The next words load while these are multiplied: so few rows wait for memory alone.
    ahead = tl.load(codes + line[:, None] * words + word[None, :])
    for start in range(0, words, WORDS):
        bits = ahead
        following = tl.minimum(start + WORDS, words - WORDS)
        ahead = tl.load(codes + line[:, None] * words + (following + word)[None, :])
        inputs = tl.load(x_words + (start + word)[None, :])
        first = _four_products(bits, tl.broadcast_to(inputs, bits.shape), first, INTERPRETED)
        if rows > 1:
            inputs = tl.load(x_words + words + (start + word)[None, :])
            second = _four_products(bits, tl.broadcast_to(inputs, bits.shape), second, INTERPRETED)
    row = tl.arange(0, ROWS)
    lower = tl.where(row[None, :] == 1, tl.sum(second, 1)[:, None], 0)
    total = tl.where(row[None, :] == 0, tl.sum(first, 1)[:, None], lower)
    finished = _scaled_sums(
        total, row, column, rows, columns, x, x_stride, x_scales, scales, outlier_columns, outlier_weights, outliers,
        bias, HAS_OUTLIERS, BIAS, WIDE, OUTLIER_BLOCK,
    )  # fmt: skip
    mask = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(out + row[None, :] * columns + column[:, None], finished.to(out.dtype.element_ty), mask=mask)


@triton.jit
def finish_parts(
    parts: Arg, count: Arg, x: Arg, x_stride: Arg, x_scales: Arg, scales: Arg, outlier_columns: Arg,
    outlier_weights: Arg, outliers: Arg, bias: Arg, out: Arg, rows: Arg, columns: Arg, HAS_OUTLIERS: tl.constexpr,
    BIAS: tl.constexpr, WIDE: tl.constexpr, OUTLIER_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute y (M, N) from the parts (count, M, N) of its sums."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_index, column_index = row.to(tl.int64), column.to(tl.int64)
    mask = (column < columns)[:, None] & (row < rows)[None, :]
    total = tl.zeros((COLUMNS, ROWS), tl.int32)
    for part in range(count):
        at = parts + (part * rows + row_index[None, :]) * columns + column_index[:, None]
        total += tl.load(at, mask=mask, other=0)
    scaled = _scaled_sums(
        total, row, column, rows, columns, x, x_stride, x_scales, scales, outlier_columns, outlier_weights, outliers,
        bias, HAS_OUTLIERS, BIAS, WIDE, OUTLIER_BLOCK,
    )  # fmt: skip
    tl.store(out + row_index[None, :] * columns + column_index[:, None], scaled.to(out.dtype.element_ty), mask=mask)


def tile_of(rows: int, columns: int, processors: int) -> ProgramTile:
    """Return the tile for a product (rows, columns): 128 columns if each processor has a block then, else half."""
    if rows <= 64:
        return ProgramTile(64, max(16, power_of_two(rows)), inner=128, warps=4, stages=4, resident=3)
    if ceil_div(columns, 128) * ceil_div(rows, 128) >= processors:
        return ProgramTile(128, 128, inner=128, warps=8, stages=3)
    return ProgramTile(64, 128, inner=128, warps=4, stages=3)


@lru_cache(4096)
def arranged(rows: int, columns: int, inner: int, processors: int) -> tuple[ProgramTile, int, int]:
    """Return the tile, the runs that K is cut into, and the inputs of each."""
    tile = tile_of(rows, columns, processors)
    parts = parts_of(rows, columns, inner, tile, processors)
    run = ceil_div(ceil_div(inner, parts), tile.inner) * tile.inner
    return tile, ceil_div(inner, run), run


def int8_linear(x: Tensor, narrow: NarrowRows, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    """Multiply x (M, K), given also in rounded form without the matrix's outlier columns, by the matrix transposed.

    Adds bias (N,). Returns (M, N).
    """
    x = rows_of(x)
    (rows, inner), columns = x.shape, len(matrix.codes)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    has_outliers = matrix.columns is not None and matrix.outlier_weights is not None
    shared = (
        x, x.stride(0), narrow.scales, matrix.scales.reshape(-1), matrix.columns if has_outliers else x,
        matrix.outlier_weights if has_outliers else x, 0 if matrix.columns is None else len(matrix.columns),
        x if bias is None else bias,
    )  # fmt: skip
    forms = {
        "HAS_OUTLIERS": has_outliers, "BIAS": bias is not None, "WIDE": wide_products(int8_rows, x), "OUTLIER_BLOCK":
        OUTLIER_BLOCK,
    }  # fmt: skip
    # One and two rows wait for memory: a kernel without tensor cores, unless its words are not aligned.
    # The words of a step divide a row, so no load needs a mask.
    words = gcd(inner // 4, FEW_WORDS)
    aligned = inner % 4 == 0 and matrix.codes.storage_offset() % 4 == 0
    if rows <= MOST_ROWS and aligned and words >= LEAST_WORDS:
        few_int8_rows[(ceil_div(columns, FEW_COLUMNS),)](
            narrow.codes.view(torch.int32), matrix.codes.view(torch.int32), *shared, out, rows, columns, inner // 4,
            INTERPRETED=interpreted(few_int8_rows), WORDS=words, COLUMNS=FEW_COLUMNS, ROWS=FINISHED_ROWS,
            num_warps=FEW_WARPS, **forms,
        )  # fmt: skip
        return out
    tile, parts, run = arranged(rows, columns, inner, programs(x))
    forms |= {"COLUMNS": tile.columns, "ROWS": tile.rows, "num_warps": tile.warps}
    into = out if parts == 1 else torch.empty((parts, rows, columns), dtype=torch.int32, device=x.device)
    blocks = ceil_div(columns, tile.columns), ceil_div(rows, tile.rows)
    int8_rows[(blocks[0] * blocks[1], parts)](
        narrow.codes, matrix.codes, *shared, into, rows, columns, inner, run, PART=parts > 1, ALONGSIDE=ALONGSIDE,
        INNER=tile.inner, num_stages=tile.stages, **forms,
    )  # fmt: skip
    if parts > 1:
        finish_parts[blocks](into, parts, *shared, out, rows, columns, **forms)
    return out
