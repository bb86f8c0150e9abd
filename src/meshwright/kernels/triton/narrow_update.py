"""AdamW update of narrow moments in one kernel: everything is read once and written once (kernels.optimizer.adamw).

bf16 weights and moments come as int16 bits. They are rounded by adding random bits to those of an fp32 number, and the
interpreter computes no bf16.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import ELEMENTS, Arg, ceil_div
from meshwright.kernels.triton.narrow_piece import NarrowPiece, UpdateNumbers

BLOCK = 256
"""Elements of a row in a block, where moments have no blocks."""
FP32, BF16, INT8 = 0, 1, 2
IN_PLACE, WITH_COPY, ROUNDED = 0, 1, 2
"""Forms of the weight: fp32; an fp32 master and its 16-bit copy; bf16 alone."""
NEVER = -1e30
"""Stands for the logarithm of a beta of 0."""


@triton.jit
def _hashed(x: Arg) -> Arg:
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _widened(bits: Arg) -> Arg:
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x: Arg, bits: Arg) -> Arg:
    half = ((x.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) >> 16).to(tl.int16)
    return tl.where(x != x, 0x7FC0, half).to(tl.int16)  # the sum of a NaN's bits may be those of a number


@triton.jit
def _read(values: Arg, at: Arg, scale: Arg, inside: Arg, book: Arg, FORMAT: tl.constexpr) -> Arg:
    held = tl.load(values + at, mask=inside, other=0)
    if FORMAT == 2:
        numbers = tl.where(inside, tl.load(book + held.to(tl.int32)) * scale, 0.0)
    elif FORMAT == 1:
        numbers = _widened(held)
    else:
        numbers = held
    return numbers


@triton.jit
def _codes(share: Arg, middles: Arg) -> Arg:
    """Count the middles that each number exceeds, by halving."""
    codes = tl.zeros(share.shape, tl.int32)
    for level in tl.static_range(8):
        half = 128 >> level
        codes += tl.where(share > tl.load(middles + codes + (half - 1)), half, 0)
    return codes


@triton.jit
def adamw_numbers(
    wide: Arg, mean: Arg, square: Arg, incoming: Arg, number: Arg, rate: Arg, beta1: Arg, rest1: Arg, beta2: Arg,
    rest2: Arg, log_beta1: Arg, log_beta2: Arg, epsilon: Arg, decay: Arg,
) -> tuple[Arg, Arg, Arg]:  # fmt: skip
    """Return weight and moments after update `number`."""
    mean = mean * beta1 + incoming * rest1
    square = square * beta2 + incoming * incoming * rest2
    bias1 = (1 - tl.exp(number.to(tl.float64) * log_beta1)).to(tl.float32)
    bias2 = (1 - tl.exp(number.to(tl.float64) * log_beta2)).to(tl.float32)
    size = tl.sqrt(square) / tl.sqrt(bias2) + epsilon
    return wide * (1 - rate * decay) - rate / bias1 * mean / size, mean, square


@triton.jit
def narrow_rows(
    weight: Arg, copy: Arg, gradient: Arg, gradient_stride: Arg, first: Arg, second: Arg, first_scales: Arg,
    second_scales: Arg, books: Arg, step: Arg, divide_by: Arg, skip: Arg, rate: Arg, beta1: Arg, rest1: Arg, beta2:
    Arg, rest2: Arg, log_beta1: Arg, log_beta2: Arg, epsilon: Arg, decay: Arg, seed: Arg, rows: Arg, width: Arg,
    blocks: Arg, inner: Arg, whole_inner: Arg, row_first: Arg, row_second: Arg, whole_width: Arg, column_first: Arg,
    FORMAT: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Update one block of each of some rows in each program. Nothing is written where `skip` is 1."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    known = row < tl.where(tl.load(skip) > 0, 0, rows)
    inside = known & (column < width)
    at = row * width + column
    scale_at = row * blocks + tl.program_id(1)
    first_scale = tl.load(first_scales + scale_at, mask=known, other=0.0) if FORMAT == 2 else 0.0
    second_scale = tl.load(second_scales + scale_at, mask=known, other=0.0) if FORMAT == 2 else 0.0
    mean = _read(first, at, first_scale, inside, books, FORMAT)
    square = _read(second, at, second_scale, inside, books + 512, FORMAT)
    incoming = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
    incoming = incoming / tl.load(divide_by)
    number = tl.load(step)
    held = tl.load(weight + at, mask=inside, other=0)
    wide, mean, square = adamw_numbers(
        _widened(held) if WEIGHT == 2 else held, mean, square, incoming, number, rate, beta1, rest1, beta2, rest2,
        log_beta1, log_beta2, epsilon, decay,
    )  # fmt: skip
    # Random bits depend on the position in the whole tensor, not on this piece: layouts give the same bits.
    if FORMAT == 1 or WEIGHT == 2:
        whole_row = (row // inner + row_first) * whole_inner + row % inner + row_second
        counter = (whole_row * whole_width + column_first + column).to(tl.uint32)
        key = (number.to(tl.int64) * 0x9E3779B9 + seed).to(tl.uint32)
        bits = _hashed(counter ^ _hashed(key))
    if FORMAT == 0:
        tl.store(first + at, mean, mask=inside)
        tl.store(second + at, square, mask=inside)
    if FORMAT == 1:
        tl.store(first + at, _rounded(mean, bits), mask=inside)
        tl.store(second + at, _rounded(square, bits >> 16), mask=inside)
    if FORMAT == 2:
        first_scale = tl.max(tl.where(inside, tl.abs(mean), 0.0), 1)[:, None]
        second_scale = tl.max(tl.where(inside, square, 0.0), 1)[:, None]
        codes = _codes(mean / tl.where(first_scale > 0, first_scale, 1.0), books + 256)
        tl.store(first + at, codes.to(tl.uint8), mask=inside)
        codes = _codes(square / tl.where(second_scale > 0, second_scale, 1.0), books + 768)
        codes = tl.where((codes == 0) & (square > 0), 1, codes)  # AdamW would divide by epsilon alone
        tl.store(second + at, codes.to(tl.uint8), mask=inside)
        tl.store(first_scales + scale_at, first_scale, mask=known)
        tl.store(second_scales + scale_at, second_scale, mask=known)
    if WEIGHT == 2:
        tl.store(weight + at, _rounded(wide, _hashed(bits ^ 0x85EBCA6B)), mask=inside)
    else:
        tl.store(weight + at, wide, mask=inside)
    if WEIGHT == 1:
        tl.store(copy + at, wide.to(copy.dtype.element_ty), mask=inside)


def narrow_adamw(piece: NarrowPiece, gradient: Tensor, numbers: UpdateNumbers) -> None:
    """Update as kernels.optimizer.adamw.narrow_adamw, without temporaries."""
    (first, second), position, (rows, width) = piece.moments, piece.position, gradient.shape
    if not rows or not width:
        return
    kind = {torch.float32: FP32, torch.bfloat16: BF16, torch.uint8: INT8}[first.values.dtype]
    weight = ROUNDED if piece.weight.dtype == torch.bfloat16 else IN_PLACE if piece.copy is None else WITH_COPY
    block = first.block or BLOCK
    rows_per_program, blocks = max(1, ELEMENTS // block), ceil_div(width, block)
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    narrow_rows[(ceil_div(rows, rows_per_program), blocks)](
        _bits(piece.weight), piece.weight if piece.copy is None else piece.copy, gradient, gradient.stride(0),
        _bits(first.values), _bits(second.values), first.scales, second.scales, piece.books, piece.step,
        numbers.divide_by, numbers.skip, numbers.rate, numbers.beta1, 1 - numbers.beta1, numbers.beta2,
        1 - numbers.beta2, logarithm(numbers.beta1), logarithm(numbers.beta2), numbers.epsilon, numbers.decay,
        position.seed, rows, width, blocks, position.rows, position.whole_rows, position.first, position.second,
        position.width, position.column, FORMAT=kind, WEIGHT=weight, ROWS=rows_per_program, BLOCK=block, num_warps=4,
    )  # fmt: skip


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def logarithm(beta: float) -> float:
    """Return the logarithm of a beta, from which the kernel computes its powers."""
    return math.log(beta) if beta > 0 else NEVER
