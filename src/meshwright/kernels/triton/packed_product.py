"""Rows times a matrix of 4-bit codes, or of 8-bit floating-point ones, that is decoded inside the product.

    out (M, N) = x (M, K) W^T + bias        W = S (q - Z), rounded to x's dtype as a restored matrix is

Up to 64 rows the matrix is the first operand of the tensor cores and x the second: a few rows of x fill them then. For
more rows x is the first: the numbers go to shared memory alone, and the products of a step wait once.

Where columns alone are too few programs for the device, K is cut, too, and a second kernel adds the parts in order.

One and two rows have a separate kernel (`few_packed_rows`). They wait for memory alone, if a code costs few
instructions: no tensor core works on padding, and W is never rounded. A thread holds words of a few rows of the matrix,
cuts codes out by shifts, and adds in fp32. Threads meet once, after the last word. Zeros and the 128 that codes carry
are subtracted once a word, with the sum of its inputs.
"""

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import (
    ELEMENTS,
    Arg,
    ceil_div,
    has_warp_groups,
    interpreted,
    power_of_two,
    programs,
)
from meshwright.kernels.triton.code_words import (
    PackedMatrix,
    e4m3_number,
    half_byte,
    load_words,
    load_zeros,
    numbers_of_words,
    table_number,
    words_of,
)

ROW_SHARE = 8
"""Least inputs of a part for each row of x.

A part costs 8 bytes a row, to write and to read, and saves none.
"""
PROCESSOR_RATE, CACHE_RATE, ADDING_US, FILLING = 4.7e6, 8.2e6, 2.2, 130
"""FLOP of one processor and bytes of the cache in a microsecond, a launch, and inputs that the start of a run costs.

Measured on an H200 (benchmarks/quantized_estimate.py). Only their ratios count.
"""
PART_BYTES, MOST_PARTS = 8, 16
"""Bytes of a number of a part, written and read; and the most parts."""
FIRST_ROWS = 64
"""Most rows of x for which the matrix is the first operand."""
MOST_ROWS = 2
"""Most rows of x: from three on tensor cores take fewer instructions a code."""
COLUMNS, WORDS, WARPS = 8, 128, 8
"""Tile of a program: one output and four words a thread.

A warp has all words of its outputs, and the inputs of a tile are fewer than the threads. The compiler then reads them
in the order of the words, not through shared memory for each code.
"""
LEAST_WORDS = 16
"""Least words of a tile without masks. Shorter rows are read byte by byte."""


@triton.jit
def _words_times(
    x: Arg, word: Arg, inner: Arg, bits: Arg, table: Arg, zero: Arg, CODES: tl.constexpr, EVEN: tl.constexpr,
    DTYPE: tl.constexpr,
) -> Arg:  # fmt: skip
    """Sum inputs times (number - Z) over each word: (outputs, words) fp32.

    EVEN: `x` points to four inputs at a time, as one integer.
    """
    total = tl.zeros(bits.shape, tl.float32)
    inputs = tl.zeros((1, bits.shape[1]), tl.float32)
    for four in tl.static_range(1 if CODES == 2 else 2):
        fourth = word * (1 if CODES == 2 else 2) + four
        if EVEN:
            packed = tl.load(x + fourth[None, :])
        for position in tl.static_range(4):
            if EVEN:
                part = (packed >> (16 * position)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            else:
                at = fourth * 4 + position
                part = tl.load(x + at[None, :], mask=(at < inner)[None, :], other=0.0).to(tl.float32)
            if CODES == 2:
                total += e4m3_number(bits, position) * part
            elif CODES == 1:
                total += table_number(bits, table, 4 * four + position) * part
            else:
                total += half_byte(bits, 4 * four + position) * part
                inputs += part
    # One subtraction a word in place of one a code.
    if CODES == 0:
        total -= inputs * (zero + 128.0)
    return total


@triton.jit
def few_packed_rows(
    x: Arg, x_stride: Arg, codes: Arg, row_bytes: Arg, scales: Arg, scale_stride: Arg, zeros: Arg, zero_stride: Arg,
    table: Arg, x_scales: Arg, bias: Arg, out: Arg, columns: Arg, inner: Arg, CODES: tl.constexpr,
    ZEROS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute COLUMNS outputs of one or two rows.

    EVEN: a row of the matrix is a multiple of WORDS words, and needs no mask; SCALED: rows of x have scales; GROUP:
    inputs that share a scale, 0 = all.
    """
    CODES_A_WORD: tl.constexpr = 4 if CODES == 2 else 8
    DTYPE: tl.constexpr = out.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Columns past the end read the last one again, and are not written. A matrix may pass 2^31 bytes.
    line = tl.minimum(column, columns - 1).to(tl.int64)
    words = tl.cdiv(row_bytes, 4)
    first = tl.zeros((COLUMNS, WORDS), tl.float32)
    second = tl.zeros((COLUMNS, WORDS), tl.float32)
    # The next words load while these are multiplied: so few rows wait for memory alone.
    ahead = load_words(codes, line, row_bytes, words, tl.arange(0, WORDS), EVEN)
    for start in range(0, words, WORDS):
        word = start + tl.arange(0, WORDS)
        bits = ahead
        following = tl.minimum(start + WORDS, words - WORDS) if EVEN else start + WORDS
        ahead = load_words(codes, line, row_bytes, words, following + tl.arange(0, WORDS), EVEN)
        group = word // (GROUP // CODES_A_WORD) if GROUP else word * 0
        if not EVEN:
            group = tl.where(word < words, group, 0)
        scale = tl.load(scales + line[:, None] * scale_stride + group[None, :]).to(tl.float32)
        zero = load_zeros(zeros, line, zero_stride, group, ZEROS)
        first += _words_times(x, word, inner, bits, table, zero, CODES, EVEN, DTYPE) * scale
        if ROWS == 2:
            second += _words_times(x + x_stride, word, inner, bits, table, zero, CODES, EVEN, DTYPE) * scale
    for row in tl.static_range(ROWS):
        total = tl.sum(first if row == 0 else second, 1)
        if SCALED:
            total *= tl.load(x_scales + row)
        if BIAS:
            total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
        tl.store(out + row * columns + column, total.to(DTYPE), mask=column < columns)


def few_rows_linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None, x_scales: Tensor | None = None) -> Tensor:
    """Multiply as packed_linear, x (M, K) with M at most MOST_ROWS and contiguous rows.

    `x_scales` (M, 1) fp32 are factors of rows of x.
    """
    rows, columns = len(x), len(matrix.codes)
    codes, row_bytes, whole_rows = words_of(matrix.codes)
    # The words of a step divide a row, so no load needs a mask.
    words = gcd(row_bytes // 4, WORDS)
    even = whole_rows and words >= LEAST_WORDS and x.stride(0) % 4 == 0 and x.storage_offset() % 4 == 0
    inputs = x.view(torch.int64) if even else x
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    zeros, table = matrix.zeros, matrix.table
    few_packed_rows[(ceil_div(columns, COLUMNS),)](
        inputs, inputs.stride(0), codes if even else matrix.codes.view(torch.uint8), row_bytes, matrix.scales,
        matrix.scales.stride(0), matrix.scales if zeros is None else zeros, 0 if zeros is None else zeros.stride(0),
        matrix.scales if table is None else table, x if x_scales is None else x_scales, x if bias is None else bias,
        out, columns, matrix.size_in, CODES=matrix.form, ZEROS=matrix.zero_form, SCALED=x_scales is not None,
        BIAS=bias is not None, EVEN=even, GROUP=matrix.group, ROWS=rows, COLUMNS=COLUMNS,
        WORDS=words if even else WORDS, num_warps=WARPS,
    )  # fmt: skip
    return out


class ProgramTile(NamedTuple):
    """Tile of one program, with its warps and stages."""

    columns: int
    rows: int
    inner: int
    warps: int
    stages: int
    resident: int = 1
    """Programs whose registers fit on a processor: one decodes while another multiplies."""


@triton.jit
def packed_rows(
    x: Arg, x_stride: Arg, codes: Arg, row_bytes: Arg, scales: Arg, scale_stride: Arg, zeros: Arg, zero_stride: Arg,
    table: Arg, bias: Arg, out: Arg, rows: Arg, columns: Arg, inner: Arg, each: Arg, CODES: tl.constexpr,
    ZEROS: tl.constexpr, BIAS: tl.constexpr, PART: tl.constexpr, WIDE: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    EVEN: tl.constexpr, PAIRS: tl.constexpr, SECOND: tl.constexpr, INTERPRETED: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one block of out (M, N), or PART: of its sum over one run of `each` inputs, in fp32.

    GROUP: inputs that share a scale, 0 = all. EVEN: inputs are a multiple of INNER; PAIRS: as in numbers_of_words;
    SECOND: the matrix is the second operand.
    """
    CODES_A_WORD: tl.constexpr = 4 if CODES == 2 else 8
    WORDS: tl.constexpr = INNER // CODES_A_WORD
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    line = tl.minimum(column, columns - 1).to(tl.int64)  # the last ones are read again, and not written
    left = x + tl.minimum(row, rows - 1)[:, None].to(tl.int64) * x_stride
    # A division that the compiler knows to be exact lets it read words side by side.
    words = row_bytes // 4 if EVEN else tl.cdiv(row_bytes, 4)
    total = tl.zeros((ROWS, COLUMNS) if SECOND else (COLUMNS, ROWS), tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, inner), INNER):
        at = start + tl.arange(0, INNER)
        word = start // CODES_A_WORD + tl.arange(0, WORDS)
        if EVEN:
            inputs = tl.load(left + at[None, :])
        else:
            # Words past the end of a row are its last one again. Their inputs are zeros.
            inputs = tl.load(left + at[None, :], mask=(at < inner)[None, :], other=0.0)
            word = tl.minimum(word, words - 1)
        bits = load_words(codes, line, row_bytes, words, word, WHOLE_ROWS)
        group = word // (GROUP // CODES_A_WORD) if GROUP else word * 0
        scale = tl.load(scales + line[:, None] * scale_stride + group[None, :])
        zero = load_zeros(zeros, line, zero_stride, group, ZEROS)
        if not PAIRS:
            scale = scale.to(tl.float32)
        weight = numbers_of_words(bits, table, zero, scale, CODES, ZEROS, PAIRS, x.dtype.element_ty)
        # Triton 3.6 fails where it moves a reshaped operand into shared memory. The assembly is a border for it.
        if not INTERPRETED:
            weight = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [weight], dtype=x.dtype.element_ty, is_pure=True, pack=2
            )
        if WIDE:
            inputs, weight = inputs.to(tl.float32), weight.to(tl.float32)
        if SECOND:
            total = tl.dot(inputs, tl.trans(weight), total, input_precision="ieee")
        else:
            total = tl.dot(weight, tl.trans(inputs), total, input_precision="ieee")
    total = tl.trans(total) if SECOND else total
    here, wanted = column < columns, row < rows
    if BIAS:
        total += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)[:, None]
    first = part.to(tl.int64) * rows if PART else 0
    at = out + (first + row[None, :]) * columns + column[:, None].to(tl.int64)
    tl.store(at, total.to(out.dtype.element_ty), mask=here[:, None] & wanted[None, :])


@triton.jit
def sum_parts(
    parts: Arg, bias: Arg, out: Arg, columns: Arg, elements: Arg, count: Arg, BIAS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Compute out (M, N) = the sum of parts (count, M, N), one after the other, plus bias (N,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    total = tl.zeros((BLOCK,), tl.float32)
    # In order, so the same call has the same bits each time.
    for part in range(count):
        total += tl.load(parts + part * elements + at, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + at % columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def tile_of(rows: int, warp_groups: bool, even: bool = True) -> ProgramTile:
    """Return the tile for a product of so many rows.

    Products of warp groups are waited for, so a program of four warps leaves room for a second one. Else each warp of
    one program waits by itself. Not `even`: rows of the matrix are read byte by byte, with masks, which need registers.
    """
    if rows <= FIRST_ROWS:
        return ProgramTile(64, max(16, power_of_two(rows)), inner=128, warps=4, stages=3, resident=3)
    if not even:
        return ProgramTile(64, 128, inner=64, warps=8, stages=3)
    if warp_groups:
        return ProgramTile(128, 128, inner=64, warps=4, stages=3, resident=2)
    return ProgramTile(128, 128, inner=64, warps=8, stages=3)


def parts_of(rows: int, columns: int, inner: int, tile: ProgramTile, processors: int) -> int:
    """Return into how many runs K is cut.

    A few rows wait for memory: as many runs as fill the device where blocks do not, if runs stay longer than two steps,
    and parts small compared with the matrix. More rows wait for products: the number of least time. That counts the
    processor with the most work, what a run costs before its first step, and parts that are written and read.
    """
    blocks = ceil_div(columns, tile.columns) * ceil_div(rows, tile.rows)
    if rows <= FIRST_ROWS:
        together = processors * tile.resident
        filling = ceil_div(together, blocks) if blocks < together else 1
        return max(1, min(filling, inner // (2 * tile.inner), inner // (ROW_SHARE * rows)))

    def microseconds(parts: int) -> float:
        most = ceil_div(blocks * parts, processors)  # of one processor
        multiplied = 2.0 * tile.columns * tile.rows * most * (inner / parts + FILLING) / PROCESSOR_RATE
        return multiplied + (ADDING_US + parts * rows * columns * PART_BYTES / CACHE_RATE if parts > 1 else 0.0)

    return min(range(1, max(1, min(MOST_PARTS, inner // (2 * tile.inner))) + 1), key=microseconds)


@lru_cache(4096)
def arranged(
    rows: int, columns: int, inner: int, processors: int, warp_groups: bool, even: bool
) -> tuple[ProgramTile, int, int]:
    """Return the tile, the runs that K is cut into, and the inputs of each."""
    tile = tile_of(rows, warp_groups, even)
    parts = parts_of(rows, columns, inner, tile, processors)
    run = ceil_div(ceil_div(inner, parts), tile.inner) * tile.inner
    return tile, ceil_div(inner, run), run


def packed_linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Multiply x (M, K) in 16 bits by the matrix transposed and add bias (N,), with sums in fp32. Returns (M, N)."""
    x = x if x.stride(-1) == 1 or x.shape[1] == 1 else x.contiguous()
    if not len(x):
        return x.new_empty(0, len(matrix.codes))
    if len(x) <= MOST_ROWS:
        return few_rows_linear(x, matrix, bias)
    rows, columns, inner = len(x), len(matrix.codes), matrix.size_in
    codes, row_bytes, whole_rows = words_of(matrix.codes)
    even = whole_rows and inner % 64 == 0  # loads need no masks
    tile, parts, run = arranged(rows, columns, inner, programs(x), has_warp_groups(x), even)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    into = out if parts == 1 else torch.empty((parts, rows, columns), dtype=torch.float32, device=x.device)
    zeros, table, by_numpy = matrix.zeros, matrix.table, interpreted(packed_rows)
    packed_rows[(ceil_div(columns, tile.columns), ceil_div(rows, tile.rows), parts)](
        x, x.stride(0), codes, row_bytes, matrix.scales, matrix.scales.stride(0),
        matrix.scales if zeros is None else zeros, 0 if zeros is None else zeros.stride(0),
        matrix.scales if table is None else table, x if bias is None else bias, into, rows, columns, inner, run,
        CODES=matrix.form, ZEROS=matrix.zero_form, BIAS=bias is not None and parts == 1, PART=parts > 1,
        WIDE=by_numpy and x.dtype == torch.bfloat16, WHOLE_ROWS=whole_rows, EVEN=even and inner % tile.inner == 0,
        PAIRS=not by_numpy and matrix.in_pairs(x.dtype), SECOND=rows > FIRST_ROWS, INTERPRETED=by_numpy,
        GROUP=matrix.group, COLUMNS=tile.columns, ROWS=tile.rows, INNER=tile.inner, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        sum_parts[(ceil_div(out.numel(), ELEMENTS),)](
            into, x if bias is None else bias, out, columns, out.numel(), parts, BIAS=bias is not None,
            BLOCK=ELEMENTS, num_warps=4,
        )  # fmt: skip
    return out
