"""Restores a matrix of 4-bit codes in one kernel: codes, scales and zeros are read once, the matrix written once."""

import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, interpreted, power_of_two
from meshwright.kernels.triton.code_words import (
    PackedMatrix,
    load_words,
    load_zeros,
    numbers_of_words,
    words_of,
)

WORDS, WARPS = 512, 4
"""Words and warps of a program: 32 numbers a thread, which are written 16 bytes at a time."""


@triton.jit
def restore_rows(
    codes: Arg, row_bytes: Arg, scales: Arg, scale_stride: Arg, zeros: Arg, zero_stride: Arg, table: Arg, out: Arg,
    rows: Arg, width: Arg, CODES: tl.constexpr, ZEROS: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    EVEN: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute out (N, K) = S (number of the code - Z). GROUP: inputs that share a scale, 0 = all."""
    CODES_A_WORD: tl.constexpr = 4 if CODES == 2 else 8
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    line = tl.minimum(row, rows - 1).to(tl.int64)  # the last ones are read again, and not written
    words = tl.cdiv(row_bytes, 4)  # not known as a multiple: a warp reads words one by one, and writes 512 bytes a time
    if not EVEN:
        word = tl.minimum(word, words - 1)
    bits = load_words(codes, line, row_bytes, words, word, WHOLE_ROWS)
    group = word // (GROUP // CODES_A_WORD) if GROUP else word * 0
    scale = tl.load(scales + line[:, None] * scale_stride + group[None, :])
    if not PAIRS:
        scale = scale.to(tl.float32)
    zero = load_zeros(zeros, line, zero_stride, group, ZEROS)
    numbers = numbers_of_words(bits, table, zero, scale, CODES, ZEROS, PAIRS, out.dtype.element_ty)
    at = tl.program_id(1) * (WORDS * CODES_A_WORD) + tl.arange(0, WORDS * CODES_A_WORD)
    mask = (row < rows)[:, None] & (at < width)[None, :]
    tl.store(out + line[:, None] * width + at[None, :], numbers, mask=mask)


def restore(matrix: PackedMatrix, out: Tensor) -> Tensor:
    """Fill `out` (N, K), contiguous, with the numbers of a matrix."""
    rows, width = out.shape
    codes, row_bytes, whole_rows = words_of(matrix.codes)
    words = ceil_div(row_bytes, 4)
    wide = min(WORDS, power_of_two(words))
    zeros, table = matrix.zeros, matrix.table
    restore_rows[(ceil_div(rows, WORDS // wide), ceil_div(words, wide))](
        codes, row_bytes, matrix.scales, matrix.scales.stride(0), matrix.scales if zeros is None else zeros,
        0 if zeros is None else zeros.stride(0), matrix.scales if table is None else table, out, rows, width,
        CODES=matrix.form, ZEROS=matrix.zero_form, WHOLE_ROWS=whole_rows, EVEN=words % wide == 0,
        PAIRS=matrix.in_pairs(out.dtype) and not interpreted(restore_rows), GROUP=matrix.group,
        ROWS=WORDS // wide, WORDS=wide, num_warps=WARPS,
    )  # fmt: skip
    return out
