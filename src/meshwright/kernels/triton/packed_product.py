"""Rows times a matrix of 4-bit codes, or of 8-bit floating-point ones, that becomes numbers inside of the product.

    out (M, N) = x (M, K) W^T + bias        W = S (q - Z), rounded to x's dtype as a restored matrix is

The matrix is the first operand of the tensor cores and x the second: a few rows of x fill them then, and what becomes
of codes stays in registers. Two codes lie in a byte: the even inputs are multiplied with the lower halves, the odd ones
with the upper. Where columns alone are too few programs for the device, K is cut, too; the parts are added in order by
a second kernel.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import ELEMENTS, Arg, ceil_div, power_of_two, programs, wide_products

WHOLE, TABLE, E4M3 = 0, 1, 2
"""Codes are whole numbers, places in a table of 16, or 8-bit floating-point numbers."""
FIXED, PACKED, REAL = 0, 1, 2
"""Zeros: 8 everywhere, half a byte each, or 16-bit numbers."""
TABLE_DTYPE = {torch.bfloat16: torch.float16, torch.float16: torch.float32}
"""Of the numbers in a table, by x's dtype: 2 bytes are read straight into registers, and are exact enough for bf16."""
ROW_SHARE = 16
"""Inputs for each row of x that a part has at least: it costs 8 bytes a row, to write and to read, and saves none."""


class PackedMatrix(NamedTuple):
    """A matrix (N, K) as the kernel reads it."""

    codes: Tensor
    """Bytes (N, ceil(K / 2)), or (N, K) of 8 bits."""
    scales: Tensor
    """(N, groups)."""
    zeros: Tensor | None
    """Bytes (N, ceil(groups / 2)), or real (N, groups)."""
    table: Tensor | None
    """(16,), of TABLE_DTYPE."""
    size_in: int
    """K."""
    group: int


class ProgramTile(NamedTuple):
    """What one program multiplies at a time, and how."""

    columns: int
    rows: int
    inner: int
    warps: int
    stages: int


@triton.jit
def _whole(both: Arg, shift: tl.constexpr, zero: Arg, scale: Arg) -> Arg:
    """S (q - Z) of half a byte, exact but for the last product. 128 + q is made by its bits: no conversion."""
    bits = ((both << 16) >> shift) & 0xF0000 | 0x43000000
    return (bits.to(tl.float32, bitcast=True) - (zero[:, None] + 128.0)) * scale[:, None]


@triton.jit
def _e4m3(code: Arg) -> Arg:
    """2^-8 times the number of an 8-bit code, fp32: fp16 has the same bits for it."""
    half = (((code & 0x7F) << 7) | ((code & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32)


@triton.jit
def _pairs(codes: Arg, place: Arg, row_bytes: Arg, here: Arg, start: Arg, INNER: tl.constexpr) -> Arg:
    """Bytes of two codes each, from input `start` on."""
    byte = start // 2 + tl.arange(0, INNER // 2)
    mask = here[:, None] & (byte[None, :] < row_bytes)
    return tl.load(codes + place[:, None] * row_bytes + byte[None, :], mask=mask, other=0)


@triton.jit
def packed_rows(
    x: Arg, x_stride: Arg, codes: Arg, row_bytes: Arg, scales: Arg, scale_stride: Arg, zeros: Arg, zero_stride: Arg,
    table: Arg, bias: Arg, out: Arg, rows: Arg, columns: Arg, inner: Arg, group: Arg, each: Arg,
    CODES: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    """One block of out (M, N), or PART: of its sum over one run of `each` inputs, in fp32. INNER divides `group`."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    here, wanted = column < columns, row < rows
    place = column.to(tl.int64)
    left = x + row[:, None].to(tl.int64) * x_stride
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    begin, end = part * each, tl.minimum(part * each + each, inner)
    if CODES == 1:
        ahead = _pairs(codes, place, row_bytes, here, begin, INNER)
    for start in range(begin, end, INNER):
        at = start + tl.arange(0, INNER)
        some = tl.load(left + at[None, :], mask=wanted[:, None] & (at[None, :] < inner), other=0.0)
        of_group = start // group
        scale = tl.load(scales + place * scale_stride + of_group, mask=here, other=0.0).to(tl.float32)
        if CODES == 2:
            mask = here[:, None] & (at[None, :] < inner)
            code = tl.load(codes + place[:, None] * row_bytes + at[None, :], mask=mask, other=0).to(tl.int32)
            weight = (_e4m3(code) * (scale * 256.0)[:, None]).to(x.dtype.element_ty)
            if WIDE:
                some, weight = some.to(tl.float32), weight.to(tl.float32)
            total = tl.dot(weight, tl.trans(some), total, input_precision="ieee")
        else:
            if CODES == 1:  # the compiler loads nothing ahead of time that names a place in memory
                both = ahead.to(tl.int32)
                ahead = _pairs(codes, place, row_bytes, here, start + INNER, INNER)
                low = tl.load(table + (both & 15)).to(tl.float32) * scale[:, None]
                high = tl.load(table + (both >> 4)).to(tl.float32) * scale[:, None]
            else:
                both = _pairs(codes, place, row_bytes, here, start, INNER).to(tl.int32)
                if ZEROS == 1:
                    pair = tl.load(zeros + place * zero_stride + of_group // 2, mask=here, other=0).to(tl.int32)
                    zero = ((pair >> ((of_group % 2) * 4)) & 15).to(tl.float32)
                elif ZEROS == 2:
                    zero = tl.load(zeros + place * zero_stride + of_group, mask=here, other=0.0).to(tl.float32)
                else:
                    zero = tl.full((COLUMNS,), 8.0, tl.float32)
                low, high = _whole(both, 0, zero, scale), _whole(both, 4, zero, scale)
            even, odd = tl.split(tl.reshape(some, (ROWS, INNER // 2, 2)))
            low, high = low.to(x.dtype.element_ty), high.to(x.dtype.element_ty)
            if WIDE:
                even, odd = even.to(tl.float32), odd.to(tl.float32)
                low, high = low.to(tl.float32), high.to(tl.float32)
            total = tl.dot(low, tl.trans(even), total, input_precision="ieee")
            total = tl.dot(high, tl.trans(odd), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)[:, None]
    first = part.to(tl.int64) * rows if PART else 0
    at = out + (first + row[None, :]) * columns + place[:, None]
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


def tile_of(rows: int, columns: int, group: int, processors: int) -> ProgramTile:
    """For a product (rows, columns), and inputs that share a scale. A few rows wait for memory: the stages of a program
    have some 16 KiB of codes on their way."""
    inner = group if group in (32, 64) else 128
    if rows <= 16:
        return ProgramTile(
            columns=64 if inner == 128 else 128, rows=16, inner=inner, warps=4, stages=8 if inner == 32 else 5
        )  # fmt: skip
    if rows <= 64:
        return ProgramTile(columns=64, rows=power_of_two(rows), inner=inner, warps=4, stages=4)
    return many_rows(rows, columns, min(inner, 64), processors)


def many_rows(rows: int, columns: int, inner: int, processors: int) -> ProgramTile:
    """128 columns where each processor has a block then, else half."""
    if ceil_div(columns, 128) * ceil_div(rows, 128) >= processors:
        return ProgramTile(columns=128, rows=128, inner=inner, warps=8, stages=3)
    return ProgramTile(columns=64, rows=128, inner=inner, warps=4, stages=3)


def parts_of(rows: int, columns: int, inner: int, tile: ProgramTile, processors: int) -> int:
    """Into how many runs K is cut, where blocks are fewer than processors: two programs for each, if runs stay longer
    than two steps, and parts small beside the matrix."""
    blocks = ceil_div(columns, tile.columns) * ceil_div(rows, tile.rows)
    if blocks >= processors:
        return 1
    return max(1, min(ceil_div(2 * processors, blocks), inner // (2 * tile.inner), inner // (ROW_SHARE * rows)))


def packed_linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """x (M, K) in 16 bit times the matrix transposed, plus bias (N,) -> (M, N) in x's dtype. Sums are fp32."""
    x = x if x.stride(-1) == 1 or x.shape[1] == 1 else x.contiguous()
    rows, columns, inner = len(x), len(matrix.codes), matrix.size_in
    tile = tile_of(rows, columns, matrix.group, programs(x))
    parts = parts_of(rows, columns, inner, tile, programs(x))
    each = ceil_div(ceil_div(inner, parts), tile.inner) * tile.inner
    parts = ceil_div(inner, each)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    into = out if parts == 1 else torch.empty((parts, rows, columns), dtype=torch.float32, device=x.device)
    zeros, table = matrix.zeros, matrix.table
    packed = zeros is not None and zeros.dtype == torch.uint8
    packed_rows[(ceil_div(columns, tile.columns), ceil_div(rows, tile.rows), parts)](
        x, x.stride(0), _bytes(matrix.codes), matrix.codes.stride(0), matrix.scales, matrix.scales.stride(0),
        matrix.scales if zeros is None else zeros, 0 if zeros is None else zeros.stride(0),
        matrix.scales if table is None else table, x if bias is None else bias, into, rows, columns, inner,
        matrix.group or max(1, inner), each,
        CODES=E4M3 if matrix.codes.dtype == torch.float8_e4m3fn else WHOLE if table is None else TABLE,
        ZEROS=FIXED if zeros is None else PACKED if packed else REAL, BIAS=bias is not None and parts == 1,
        PART=parts > 1, WIDE=wide_products(packed_rows, x), COLUMNS=tile.columns, ROWS=tile.rows, INNER=tile.inner,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        sum_parts[(ceil_div(out.numel(), ELEMENTS),)](
            into, x if bias is None else bias, out, columns, out.numel(), parts, BIAS=bias is not None,
            BLOCK=ELEMENTS, num_warps=4,
        )  # fmt: skip
    return out


def _bytes(codes: Tensor) -> Tensor:
    return codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)
