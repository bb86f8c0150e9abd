"""Decoding of codes in words of four bytes for every kernel that reads codes, and the kernel that restores a matrix.

A word holds eight 4-bit codes or four 8-bit ones, the first in its lowest bits. A thread reads whole words, several
side by side, and cuts codes out by shifts. Bytes read one by one cost more instructions than the memory leaves time
for.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, interpreted, power_of_two

WHOLE, TABLE, E4M3 = 0, 1, 2
"""Kinds of codes: 4-bit integers, indices of a table of 16, or 8-bit floating-point numbers."""
FIXED, PACKED, REAL = 0, 1, 2
"""Kinds of zeros: 8 everywhere, half a byte each, or real numbers."""
WORD_BYTES = 4
WORDS, WARPS = 512, 4
"""Words and warps of a program: 32 numbers a thread, which are written 16 bytes at a time."""


def _cut_pairs(kind: str, ones: str, base: str) -> tl.constexpr:
    """Return assembly for eight results $0 to $7, each a pair of numbers.

    Inputs are words $8 and $9, scales $10 and negative zeros $11. `ones`: two ones; `base`: two numbers in whose lowest
    bits a code is an added number.
    """
    lines = [f".reg .b32 halves, moved, whole, one, none; mov.b32 one, {ones}; mov.b32 none, 0x80008000;"]
    for code in range(8):
        # Lower halves of both words, then upper ones: a register holds the same code of two words.
        if code % 4 == 0:
            lines.append(f"prmt.b32 halves, $8, $9, {'0x5410' if code == 0 else '0x7632'};")
        source = "halves"
        if code % 4:
            lines.append(f"shr.u32 moved, halves, {4 * (code % 4)};")
            source = "moved"
        # 0xea is (a & b) | c: one instruction cuts a code out and puts it into the base.
        # Products are fma with -0, since mul of bf16 pairs needs sm_90, and adding +0 would lose a sign.
        lines += [
            f"lop3.b32 whole, {source}, 0x000f000f, {base}, 0xea;",
            f"fma.rn.{kind} whole, whole, one, $11;",
            f"fma.rn.{kind} ${code}, whole, $10, none;",
        ]
    return tl.constexpr("{" + " ".join(lines) + "}")


# 0x4300 is 128 in bf16 and 0x6400 is 1024 in fp16: a code in the lowest bits of the mantissa adds itself.
BF16_PAIRS = _cut_pairs("bf16x2", ones="0x3f803f80", base="0x43004300")
PAIR_OPERANDS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")
FP16_PAIRS = _cut_pairs("f16x2", ones="0x3c003c00", base="0x64006400")


class PackedMatrix(NamedTuple):
    """A matrix (N, K) as the kernels read it."""

    codes: Tensor
    """Bytes (N, ceil(K / 2)), or (N, K) of 8 bits."""
    scales: Tensor
    """(N, groups)."""
    zeros: Tensor | None
    """Bytes (N, ceil(groups / 2)), or real (N, groups)."""
    table: Tensor | None
    """Numbers of codes that are indices, (16,) fp32."""
    size_in: int
    """K."""
    group: int
    """Inputs that share a scale: a multiple of 8, 0 = all."""

    @property
    def form(self) -> int:
        """WHOLE, TABLE or E4M3."""
        return E4M3 if self.codes.dtype == torch.float8_e4m3fn else WHOLE if self.table is None else TABLE

    @property
    def zero_form(self) -> int:
        """FIXED, PACKED or REAL."""
        return FIXED if self.zeros is None else PACKED if self.zeros.dtype == torch.uint8 else REAL

    def in_pairs(self, dtype: torch.dtype) -> bool:
        """Return whether 16-bit arithmetic rounds a number at most once: whole zeros, and scales of that dtype."""
        return self.form == WHOLE and self.zero_form != REAL and self.scales.dtype == dtype


class CodeWords(NamedTuple):
    """Codes as arguments of a kernel."""

    codes: Tensor
    """int32 if rows are whole words, else bytes."""
    row_bytes: int
    whole_rows: bool


def words_of(codes: Tensor) -> CodeWords:
    """Return codes (N, bytes), contiguous, as words, or as bytes where a row or its offset is no multiple of four.

    Device memory itself begins at a multiple of more.
    """
    octets = codes.view(torch.uint8)
    row_bytes = octets.shape[1]
    # A word must not straddle two rows, nor begin at an address that is no multiple of its size.
    if row_bytes % WORD_BYTES == 0 and octets.storage_offset() % WORD_BYTES == 0:
        return CodeWords(octets.view(torch.int32), row_bytes, True)
    return CodeWords(octets, row_bytes, False)


@triton.jit
def load_words(codes: Arg, row: Arg, row_bytes: Arg, words: Arg, word: Arg, WHOLE_ROWS: tl.constexpr) -> Arg:
    """Load words (rows, words) int32 of existing rows (rows,) int64.

    WHOLE_ROWS: codes are int32, as the words are. Else they are bytes, and bytes past the end of a row are 0.
    """
    if WHOLE_ROWS:
        return tl.load(codes + row[:, None] * words + word[None, :])
    bits = tl.zeros((row.shape[0], word.shape[0]), tl.int32)
    for byte in tl.static_range(4):
        at = word * 4 + byte
        octet = tl.load(codes + row[:, None] * row_bytes + at[None, :], mask=(at < row_bytes)[None, :], other=0)
        bits |= octet.to(tl.int32) << (8 * byte)
    return bits


@triton.jit
def load_zeros(zeros: Arg, row: Arg, stride: Arg, group: Arg, ZEROS: tl.constexpr) -> Arg:
    """Load the zero of the group of each word, (rows, words) fp32. 8 where all share it."""
    if ZEROS == 1:
        pair = tl.load(zeros + row[:, None] * stride + (group // 2)[None, :]).to(tl.int32)
        zero = ((pair >> ((group % 2) * 4)[None, :]) & 15).to(tl.float32)
    elif ZEROS == 2:
        zero = tl.load(zeros + row[:, None] * stride + group[None, :]).to(tl.float32)
    else:
        zero = tl.full((1, 1), 8.0, tl.float32)
    return zero


@triton.jit
def half_byte(bits: Arg, code: tl.constexpr) -> Arg:
    """Return 128 + q of the code at a position of each word, fp32. The bits of the sum are written, not converted."""
    moved = bits << (16 - 4 * code) if code < 4 else bits >> (4 * code - 16)
    return ((moved & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def table_number(bits: Arg, table: Arg, code: tl.constexpr) -> Arg:
    """Look up the code at a position of each word in the table, fp32."""
    return tl.load(table + ((bits >> (4 * code)) & 15)).to(tl.float32)


@triton.jit
def e4m3_number(bits: Arg, code: tl.constexpr) -> Arg:
    """Decode the byte at a position of each word to fp32.

    The smaller type's exponent lies 120 below that of fp32, for subnormal numbers too.
    """
    moved = bits << (24 - 8 * code)
    number = (moved & -0x80000000) | ((moved >> 4) & 0x7F00000)
    return number.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def e4m3_code(x: Arg) -> Arg:
    """Encode fp32 within -448 .. 448 as the nearest 8-bit number, halves to the even one."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Rounded to 3 bits of mantissa, halves to even. 960 is 120, by which the biases of exponents differ, shifted by 3.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2^-6 numbers are 2^-9 apart, as fp32 is at 2^14: the sum rounds to them.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    return (tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _number(
    bits: Arg, table: Arg, zero: Arg, scale: Arg, code: tl.constexpr, CODES: tl.constexpr, ZEROS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> Arg:  # fmt: skip
    """Return S (number - Z), rounded once to DTYPE. Numbers of a table and of 8 bits have no zero."""
    if CODES == 2:
        return (e4m3_number(bits, code) * scale).to(DTYPE)
    if CODES == 1:
        return (table_number(bits, table, code) * scale).to(DTYPE)
    # A small real zero would lose digits when 128 is added.
    if ZEROS == 2:
        return (((half_byte(bits, code) - 128.0) - zero) * scale).to(DTYPE)
    return ((half_byte(bits, code) - (zero + 128.0)) * scale).to(DTYPE)


@triton.jit
def _eight_numbers(
    bits: Arg, table: Arg, zero: Arg, scale: Arg, CODES: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr
) -> Arg:
    """Return the numbers of words of half bytes, one tensor for each of the eight positions."""
    return (
        _number(bits, table, zero, scale, 0, CODES, ZEROS, DTYPE),
        _number(bits, table, zero, scale, 1, CODES, ZEROS, DTYPE),
        _number(bits, table, zero, scale, 2, CODES, ZEROS, DTYPE),
        _number(bits, table, zero, scale, 3, CODES, ZEROS, DTYPE),
        _number(bits, table, zero, scale, 4, CODES, ZEROS, DTYPE),
        _number(bits, table, zero, scale, 5, CODES, ZEROS, DTYPE),
        _number(bits, table, zero, scale, 6, CODES, ZEROS, DTYPE),
        _number(bits, table, zero, scale, 7, CODES, ZEROS, DTYPE),
    )


@triton.jit
def _eight_in_pairs(bits: Arg, zero: Arg, scale: Arg, DTYPE: tl.constexpr) -> Arg:
    """Return as _eight_numbers for integers with whole zeros, two words at a time. `scale` is 16-bit DTYPE.

    Halves of two words share a register, where one instruction cuts a code out of both. The difference of two integers
    is exact in 16 bits, and its product with a scale is rounded once, as from fp32.
    """
    if tl.bfloat16 == DTYPE:
        eight = tl.inline_asm_elementwise(
            BF16_PAIRS, PAIR_OPERANDS, [bits, scale, (-128.0 - zero).to(DTYPE)],
            dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        eight = tl.inline_asm_elementwise(
            FP16_PAIRS, PAIR_OPERANDS, [bits, scale, (-1024.0 - zero).to(DTYPE)],
            dtype=(tl.float16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    return eight


@triton.jit
def numbers_of_words(
    bits: Arg, table: Arg, zero: Arg, scale: Arg, CODES: tl.constexpr, ZEROS: tl.constexpr, PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> Arg:  # fmt: skip
    """Decode words (rows, words) to S (number - Z) (rows, codes), in the order of the codes.

    Zeros and scales have the size of the words, or are scalars. PAIRS: two words are cut at a time, as in
    _eight_in_pairs. Each `join` adds a last axis; the last of them is the lowest bit of a position.
    """
    if CODES == 2:
        even = tl.join(
            _number(bits, table, zero, scale, 0, CODES, ZEROS, DTYPE),
            _number(bits, table, zero, scale, 2, CODES, ZEROS, DTYPE),
        )
        odd = tl.join(
            _number(bits, table, zero, scale, 1, CODES, ZEROS, DTYPE),
            _number(bits, table, zero, scale, 3, CODES, ZEROS, DTYPE),
        )
        numbers = tl.reshape(tl.join(even, odd), (bits.shape[0], bits.shape[1] * 4))
    else:
        if PAIRS:
            n0, n1, n2, n3, n4, n5, n6, n7 = _eight_in_pairs(bits, zero, scale, DTYPE)
        else:
            n0, n1, n2, n3, n4, n5, n6, n7 = _eight_numbers(bits, table, zero, scale, CODES, ZEROS, DTYPE)
        even = tl.join(tl.join(n0, n4), tl.join(n2, n6))
        odd = tl.join(tl.join(n1, n5), tl.join(n3, n7))
        numbers = tl.reshape(tl.join(even, odd), (bits.shape[0], bits.shape[1] * 8))
    return numbers


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
    # Rows past the end read the last one again, and are not written. A matrix may pass 2^31 numbers.
    line = tl.minimum(row, rows - 1).to(tl.int64)
    # cdiv, not //: unless the compiler knows rows as whole words, a warp reads words one by one, and writes 512 bytes
    # at a time.
    words = tl.cdiv(row_bytes, 4)
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
