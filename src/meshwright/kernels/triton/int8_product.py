"""Products of 8-bit whole numbers with what stands around them, of rows that narrowing.py has rounded.

    y (M, N) = (Qx Qw^T) sx sw + x_O W_O^T + bias        Qx (M, K), Qw (N, K) int8, sums in int32: exact

Columns O of x are left out of Qx and multiplied in 16 bit, behind the sum of the others. Where columns of the result
are too few programs for the device, K is cut, too: the parts are whole numbers, so that the cut changes no bit.
"""

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, interpreted, power_of_two, programs, rows_of, wide_products
from meshwright.kernels.triton.few_rows import LEAST_WORDS, MOST_ROWS
from meshwright.kernels.triton.narrowing import NarrowRows
from meshwright.kernels.triton.packed_product import ProgramTile, parts_of

OUTLIERS = 32
"""Columns that are multiplied apart at a time."""
ALONGSIDE = 8
"""Blocks of rows whose programs run side by side, so that they share blocks of the matrix in the cache."""

FEW_COLUMNS, FEW_WORDS, FEW_WARPS, FINISHED_ROWS = 16, 128, 8, 16
"""Tile and warps of a program for few rows: two outputs and four words a thread; and the least rows of a product of
tensor cores, which outliers are multiplied with."""


class Int8Matrix(NamedTuple):
    """W (N, K)."""

    codes: Tensor
    """(N, K) int8."""
    scales: Tensor
    """(N, 1)."""
    columns: Tensor | None = None
    """(O,), left out of the codes."""
    kept: Tensor | None = None
    """(N, O): their weights."""


@triton.jit
def _finished(
    total: Arg, row: Arg, column: Arg, rows: Arg, columns: Arg, x: Arg, x_stride: Arg, x_scales: Arg, scales: Arg,
    apart: Arg, kept: Arg, outliers: Arg, bias: Arg, KEPT: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
    OUTLIERS: tl.constexpr,
) -> Arg:  # fmt: skip
    """Exact sums (COLUMNS, ROWS) int32 -> y transposed, fp32."""
    here, wanted = column < columns, row < rows
    right = tl.load(scales + column, mask=here, other=0.0).to(tl.float32)
    found = total.to(tl.float32) * right[:, None] * tl.load(x_scales + row, mask=wanted, other=0.0)[None, :]
    if KEPT:
        for start in range(0, outliers, OUTLIERS):
            at = start + tl.arange(0, OUTLIERS)
            inside = at < outliers
            where = tl.load(apart + at, mask=inside, other=0).to(tl.int64)
            left = x + row[None, :].to(tl.int64) * x_stride + where[:, None]
            some = tl.load(left, mask=inside[:, None] & wanted[None, :], other=0.0)
            own = kept + column[:, None].to(tl.int64) * outliers + at[None, :]
            weight = tl.load(own, mask=here[:, None] & inside[None, :], other=0.0).to(some.dtype)
            if WIDE:
                some, weight = some.to(tl.float32), weight.to(tl.float32)
            found = tl.dot(weight, some, found, input_precision="ieee")
    if BIAS:
        found += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)[:, None]
    return found


@triton.jit
def int8_rows(
    x_codes: Arg, codes: Arg, x: Arg, x_stride: Arg, x_scales: Arg, scales: Arg, apart: Arg, kept: Arg, outliers: Arg,
    bias: Arg, out: Arg, rows: Arg, columns: Arg, inner: Arg, each: Arg, KEPT: tl.constexpr, BIAS: tl.constexpr,
    PART: tl.constexpr, WIDE: tl.constexpr, OUTLIERS: tl.constexpr, ALONGSIDE: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    """One block of y (M, N), or PART: of the sum over one run of `each` inputs, int32."""
    blocks, across = tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS)
    first = (tl.program_id(0) // (ALONGSIDE * blocks)) * ALONGSIDE
    beside = tl.minimum(across - first, ALONGSIDE)
    number = tl.program_id(0) % (ALONGSIDE * blocks)
    row = (first + number % beside) * ROWS + tl.arange(0, ROWS)
    column = (number // beside) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    here, wanted = column < columns, row < rows
    place, line = column.to(tl.int64), row.to(tl.int64)
    total = tl.zeros((COLUMNS, ROWS), tl.int32)
    for start in range(part * each, tl.minimum(part * each + each, inner), INNER):
        at = start + tl.arange(0, INNER)
        mask = here[:, None] & (at[None, :] < inner)
        weight = tl.load(codes + place[:, None] * inner + at[None, :], mask=mask, other=0)
        mask = (at[:, None] < inner) & wanted[None, :]
        some = tl.load(x_codes + line[None, :] * inner + at[:, None], mask=mask, other=0)
        total = tl.dot(weight, some, total, out_dtype=tl.int32)
    mask = here[:, None] & wanted[None, :]
    if PART:
        tl.store(out + (part.to(tl.int64) * rows + line[None, :]) * columns + place[:, None], total, mask=mask)
    else:
        found = _finished(
            total, row, column, rows, columns, x, x_stride, x_scales, scales, apart, kept, outliers, bias, KEPT, BIAS,
            WIDE, OUTLIERS,
        )  # fmt: skip
        tl.store(out + line[None, :] * columns + place[:, None], found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _four_products(words: Arg, inputs: Arg, total: Arg, INTERPRETED: tl.constexpr) -> Arg:
    """total + the products of four 8-bit numbers of each word; one instruction of a GPU."""
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
    x_words: Arg, codes: Arg, x: Arg, x_stride: Arg, x_scales: Arg, scales: Arg, apart: Arg, kept: Arg, outliers: Arg,
    bias: Arg, out: Arg, rows: Arg, columns: Arg, words: Arg, KEPT: tl.constexpr, BIAS: tl.constexpr,
    WIDE: tl.constexpr, INTERPRETED: tl.constexpr, OUTLIERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """COLUMNS outputs of one or two rows, of codes read as words of four. WORDS divides the words of a row. The result
    is finished in a block of ROWS rows, most of them empty, as a larger product is: to the same bit."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.minimum(column, columns - 1).to(tl.int64)  # the last ones are read again, and not written
    word = tl.arange(0, WORDS)
    first = tl.zeros((COLUMNS, WORDS), tl.int32)
    second = tl.zeros((COLUMNS, WORDS), tl.int32)
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
    finished = _finished(
        total, row, column, rows, columns, x, x_stride, x_scales, scales, apart, kept, outliers, bias, KEPT, BIAS, WIDE,
        OUTLIERS,
    )  # fmt: skip
    mask = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(out + row[None, :] * columns + column[:, None], finished.to(out.dtype.element_ty), mask=mask)


@triton.jit
def finish_parts(
    parts: Arg, count: Arg, x: Arg, x_stride: Arg, x_scales: Arg, scales: Arg, apart: Arg, kept: Arg, outliers: Arg,
    bias: Arg, out: Arg, rows: Arg, columns: Arg, KEPT: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
    OUTLIERS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """y (M, N) of the parts (count, M, N) of its sums."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    line, place = row.to(tl.int64), column.to(tl.int64)
    mask = (column < columns)[:, None] & (row < rows)[None, :]
    total = tl.zeros((COLUMNS, ROWS), tl.int32)
    for part in range(count):
        at = parts + (part * rows + line[None, :]) * columns + place[:, None]
        total += tl.load(at, mask=mask, other=0)
    found = _finished(
        total, row, column, rows, columns, x, x_stride, x_scales, scales, apart, kept, outliers, bias, KEPT, BIAS, WIDE,
        OUTLIERS,
    )  # fmt: skip
    tl.store(out + line[None, :] * columns + place[:, None], found.to(out.dtype.element_ty), mask=mask)


def tile_of(rows: int, columns: int, processors: int) -> ProgramTile:
    """For a product (rows, columns): 128 columns where each processor has a block then, else half."""
    if rows <= 64:
        return ProgramTile(64, max(16, power_of_two(rows)), inner=128, warps=4, stages=4, resident=3)
    if ceil_div(columns, 128) * ceil_div(rows, 128) >= processors:
        return ProgramTile(128, 128, inner=128, warps=8, stages=3)
    return ProgramTile(64, 128, inner=128, warps=4, stages=3)


@lru_cache(4096)
def arranged(rows: int, columns: int, inner: int, processors: int) -> tuple[ProgramTile, int, int]:
    """Tile, runs that K is cut into, and inputs of each."""
    tile = tile_of(rows, columns, processors)
    parts = parts_of(rows, columns, inner, tile, processors)
    each = ceil_div(ceil_div(inner, parts), tile.inner) * tile.inner
    return tile, ceil_div(inner, each), each


def int8_linear(x: Tensor, narrow: NarrowRows, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    """x (M, K), and the same rounded without the matrix's columns, times it transposed, plus bias (N,) -> (M, N)."""
    x = rows_of(x)
    (rows, inner), columns = x.shape, len(matrix.codes)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    kept = matrix.columns is not None and matrix.kept is not None
    beside = (
        x, x.stride(0), narrow.scales, matrix.scales.reshape(-1), matrix.columns if kept else x,
        matrix.kept if kept else x, 0 if matrix.columns is None else len(matrix.columns), x if bias is None else bias,
    )  # fmt: skip
    forms = {
        "KEPT": kept, "BIAS": bias is not None, "WIDE": wide_products(int8_rows, x), "OUTLIERS": OUTLIERS,
    }  # fmt: skip
    words = gcd(inner // 4, FEW_WORDS)
    aligned = inner % 4 == 0 and matrix.codes.storage_offset() % 4 == 0
    if rows <= MOST_ROWS and aligned and words >= LEAST_WORDS:
        few_int8_rows[(ceil_div(columns, FEW_COLUMNS),)](
            narrow.codes.view(torch.int32), matrix.codes.view(torch.int32), *beside, out, rows, columns, inner // 4,
            INTERPRETED=interpreted(few_int8_rows), WORDS=words, COLUMNS=FEW_COLUMNS, ROWS=FINISHED_ROWS,
            num_warps=FEW_WARPS, **forms,
        )  # fmt: skip
        return out
    tile, parts, each = arranged(rows, columns, inner, programs(x))
    forms |= {"COLUMNS": tile.columns, "ROWS": tile.rows, "num_warps": tile.warps}
    into = out if parts == 1 else torch.empty((parts, rows, columns), dtype=torch.int32, device=x.device)
    blocks = ceil_div(columns, tile.columns), ceil_div(rows, tile.rows)
    int8_rows[(blocks[0] * blocks[1], parts)](
        narrow.codes, matrix.codes, *beside, into, rows, columns, inner, each, PART=parts > 1, ALONGSIDE=ALONGSIDE,
        INNER=tile.inner, num_stages=tile.stages, **forms,
    )  # fmt: skip
    if parts > 1:
        finish_parts[blocks](into, parts, *beside, out, rows, columns, **forms)
    return out
