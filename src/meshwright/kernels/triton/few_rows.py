"""Products of one or two rows with a matrix of codes: every code is read once, and no tensor core works on padding.

    out (M, N) = x (M, K) W^T + bias        M <= 2, W = S (q - Z), never rounded

So few rows wait for memory alone, if a code costs few instructions. A thread holds words of a few rows of the matrix,
cuts codes out by shifts, and adds in fp32. Threads meet once, after the last word. The next words load while these are
multiplied. Zeros and the 128 that codes carry are subtracted once a word, with the sum of its inputs.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div
from meshwright.kernels.triton.code_words import (
    PackedMatrix,
    e4m3_number,
    half_byte,
    load_words,
    load_zeros,
    table_number,
    words_of,
)

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
    line = tl.minimum(column, columns - 1).to(tl.int64)  # the last ones are read again, and not written
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


def packed_linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None, x_scales: Tensor | None = None) -> Tensor:
    """Multiply as packed_product.packed_linear, x (M, K) with M at most MOST_ROWS and contiguous rows.

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
