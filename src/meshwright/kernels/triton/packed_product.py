"""Rows times a matrix of 4-bit codes, or of 8-bit floating-point ones, that becomes numbers inside of the product.

    out (M, N) = x (M, K) W^T + bias        W = S (q - Z), rounded to x's dtype as a restored matrix is

The matrix is the first operand of the tensor cores and x the second: a few rows of x fill them then. Where columns
alone are too few programs for the device, K is cut, too; the parts are added in order by a second kernel. One and two
rows have a kernel of their own (few_rows.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton import few_rows
from meshwright.kernels.triton.blocks import ELEMENTS, Arg, ceil_div, power_of_two, programs, wide_products
from meshwright.kernels.triton.code_words import (
    PackedMatrix,
    load_words,
    load_zeros,
    numbers_of_words,
    words_of,
)

ROW_SHARE = 16
"""Inputs for each row of x that a part has at least: it costs 8 bytes a row, to write and to read, and saves none."""
RESIDENT = 3
"""Programs of up to 64 rows that share a processor, so that one computes while another waits (registers: 170)."""


class ProgramTile(NamedTuple):
    """What one program multiplies at a time, and how."""

    columns: int
    rows: int
    inner: int
    warps: int
    stages: int


@triton.jit
def packed_rows(
    x: Arg, x_stride: Arg, codes: Arg, row_bytes: Arg, scales: Arg, scale_stride: Arg, zeros: Arg, zero_stride: Arg,
    table: Arg, bias: Arg, out: Arg, rows: Arg, columns: Arg, inner: Arg, each: Arg, CODES: tl.constexpr,
    ZEROS: tl.constexpr, BIAS: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    """One block of out (M, N), or PART: of its sum over one run of `each` inputs, in fp32. GROUP: inputs that share a
    scale, 0 = all."""
    CODES_A_WORD: tl.constexpr = 4 if CODES == 2 else 8
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    here, wanted = column < columns, row < rows
    line = tl.minimum(column, columns - 1).to(tl.int64)  # the last ones are read again, and not written
    left = x + row[:, None].to(tl.int64) * x_stride
    words = tl.cdiv(row_bytes, 4)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, inner), INNER):
        at = start + tl.arange(0, INNER)
        inputs = tl.load(left + at[None, :], mask=wanted[:, None] & (at[None, :] < inner), other=0.0)
        # Words behind the end of a row are those of its last one: their inputs are zeros.
        word = tl.minimum(start // CODES_A_WORD + tl.arange(0, INNER // CODES_A_WORD), words - 1)
        bits = load_words(codes, line, row_bytes, words, word, WHOLE_ROWS)
        group = word // (GROUP // CODES_A_WORD) if GROUP else word * 0
        scale = tl.load(scales + line[:, None] * scale_stride + group[None, :]).to(tl.float32)
        zero = load_zeros(zeros, line, zero_stride, group, ZEROS)
        weight = numbers_of_words(bits, table, zero, scale, CODES, ZEROS, x.dtype.element_ty)
        if WIDE:
            inputs, weight = inputs.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(weight, tl.trans(inputs), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)[:, None]
    first = part.to(tl.int64) * rows if PART else 0
    at = out + (first + row[None, :]) * columns + column[:, None].to(tl.int64)
    tl.store(at, total.to(out.dtype.element_ty), mask=here[:, None] & wanted[None, :])


@triton.jit
def sum_parts(
    parts: Arg, bias: Arg, out: Arg, columns: Arg, elements: Arg, count: Arg, BIAS: tl.constexpr, BLOCK: tl.constexpr
) -> None:  # fmt: skip
    """out (M, N) = the sum of parts (count, M, N), one after the other, plus bias (N,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(count):
        total += tl.load(parts + part * elements + at, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + at % columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def tile_of(rows: int, columns: int, processors: int) -> ProgramTile:
    """For a product (rows, columns)."""
    if rows <= 64:
        return ProgramTile(columns=64, rows=max(16, power_of_two(rows)), inner=128, warps=4, stages=3)
    return many_rows(rows, columns, 64, processors)


def many_rows(rows: int, columns: int, inner: int, processors: int) -> ProgramTile:
    """128 columns where each processor has a block then, else half."""
    if ceil_div(columns, 128) * ceil_div(rows, 128) >= processors:
        return ProgramTile(columns=128, rows=128, inner=inner, warps=8, stages=3)
    return ProgramTile(columns=64, rows=128, inner=inner, warps=4, stages=3)


def parts_of(rows: int, columns: int, inner: int, tile: ProgramTile, processors: int) -> int:
    """Into how many runs K is cut, where blocks are fewer than a device runs at once: as many as it does, if runs stay
    longer than two steps, and parts small beside the matrix."""
    blocks = ceil_div(columns, tile.columns) * ceil_div(rows, tile.rows)
    together = processors * (RESIDENT if rows <= 64 else 1)
    if blocks >= together:
        return 1
    return max(1, min(ceil_div(together, blocks), inner // (2 * tile.inner), inner // (ROW_SHARE * rows)))


def packed_linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """x (M, K) in 16 bit times the matrix transposed, plus bias (N,) -> (M, N) in x's dtype. Sums are fp32."""
    x = x if x.stride(-1) == 1 or x.shape[1] == 1 else x.contiguous()
    if not len(x):
        return x.new_empty(0, len(matrix.codes))
    if len(x) <= few_rows.MOST_ROWS:
        return few_rows.packed_linear(x, matrix, bias)
    rows, columns, inner = len(x), len(matrix.codes), matrix.size_in
    tile = tile_of(rows, columns, programs(x))
    parts = parts_of(rows, columns, inner, tile, programs(x))
    each = ceil_div(ceil_div(inner, parts), tile.inner) * tile.inner
    parts = ceil_div(inner, each)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    into = out if parts == 1 else torch.empty((parts, rows, columns), dtype=torch.float32, device=x.device)
    zeros, table = matrix.zeros, matrix.table
    codes, row_bytes, whole_rows = words_of(matrix.codes)
    packed_rows[(ceil_div(columns, tile.columns), ceil_div(rows, tile.rows), parts)](
        x, x.stride(0), codes, row_bytes, matrix.scales, matrix.scales.stride(0),
        matrix.scales if zeros is None else zeros, 0 if zeros is None else zeros.stride(0),
        matrix.scales if table is None else table, x if bias is None else bias, into, rows, columns, inner, each,
        CODES=matrix.form, ZEROS=matrix.zero_form, BIAS=bias is not None and parts == 1, PART=parts > 1,
        WIDE=wide_products(packed_rows, x), WHOLE_ROWS=whole_rows, GROUP=matrix.group, COLUMNS=tile.columns,
        ROWS=tile.rows, INNER=tile.inner, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        sum_parts[(ceil_div(out.numel(), ELEMENTS),)](
            into, x if bias is None else bias, out, columns, out.numel(), parts, BIAS=bias is not None,
            BLOCK=ELEMENTS, num_warps=4,
        )  # fmt: skip
    return out
