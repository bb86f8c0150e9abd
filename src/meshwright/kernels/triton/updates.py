"""AdamW updates and sums of squares. Each number is read once and written once.

`adamw` and `squares` take many tensors with fp32 states in one launch, `narrow_adamw` one tensor with narrow states.

A launch gets addresses, not tensors: a table of them is copied to the device before. Tensors are cut into chunks of
BLOCKS blocks, and a second table maps chunks to tensors. Where all addresses are multiples of 16 bytes, as those of
tensors with separate memory are, loads are 16 bytes wide.

bf16 weights and moments of `narrow_adamw` come as int16 bits. They are rounded by adding random bits to those of an
fp32 number, and the interpreter computes no bf16.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import ELEMENTS, Arg, ceil_div
from meshwright.kernels.triton.narrow_piece import NarrowPiece, UpdateNumbers

BLOCK = ELEMENTS
"""Elements that a program updates."""
SUMMED = 4096
"""Elements whose squares a program adds at a time."""
CHUNK = 32768
"""Elements of a chunk."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
WIDEST = 16
"""Bytes of a load."""
GRADIENT, MASTER, FIRST, SECOND, COPY, STEP, SIZE = (tl.constexpr(row) for row in range(7))
"""Rows of the table of addresses."""
ROW_BLOCK = 256
"""Elements of a row in a block, where moments have no blocks."""
FP32, BF16, INT8 = 0, 1, 2
IN_PLACE, WITH_COPY, ROUNDED = 0, 1, 2
"""Forms of the weight: fp32; an fp32 master and its 16-bit copy; bf16 alone."""
NEVER = -1e30
"""Stands for the logarithm of a beta of 0."""


@triton.jit
def _hashed(x: Arg) -> Arg:
    # Multipliers of the 32-bit hash `lowbias32`, found by search (Wellons 2018, hash-prospector).
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _widened(bits: Arg) -> Arg:
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x: Arg, bits: Arg) -> Arg:
    # Random bits below the cut carry into the last bit as often as the fraction is large.
    half = ((x.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) >> 16).to(tl.int16)
    # The sum of a NaN's bits may be those of a number.
    return tl.where(x != x, 0x7FC0, half).to(tl.int16)


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
    # In fp32 1 - beta^t would lose three digits of seven in the first step, with a beta of 0.999.
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
    # A mask, not a branch of the host: it does not know yet whether gradients were finite.
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
        # 2^32 / golden ratio spreads successive steps over all keys.
        key = (number.to(tl.int64) * 0x9E3779B9 + seed).to(tl.uint32)
        bits = _hashed(counter ^ _hashed(key))
    if FORMAT == 0:
        tl.store(first + at, mean, mask=inside)
        tl.store(second + at, square, mask=inside)
    if FORMAT == 1:
        # The two moments take separate halves of the random bits, the weight below a new hash.
        tl.store(first + at, _rounded(mean, bits), mask=inside)
        tl.store(second + at, _rounded(square, bits >> 16), mask=inside)
    if FORMAT == 2:
        first_scale = tl.max(tl.where(inside, tl.abs(mean), 0.0), 1)[:, None]
        second_scale = tl.max(tl.where(inside, square, 0.0), 1)[:, None]
        codes = _codes(mean / tl.where(first_scale > 0, first_scale, 1.0), books + 256)
        tl.store(first + at, codes.to(tl.uint8), mask=inside)
        codes = _codes(square / tl.where(second_scale > 0, second_scale, 1.0), books + 768)
        # A square rounded to 0 would let AdamW divide by epsilon alone.
        codes = tl.where((codes == 0) & (square > 0), 1, codes)
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
    block = first.block or ROW_BLOCK
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


@triton.jit
def _pointer(
    addresses: Arg, tensors: Arg, row: tl.constexpr, tensor: Arg, TYPE: tl.constexpr, ALIGNED: tl.constexpr
) -> Arg:
    pointer = tl.load(addresses + row * tensors + tensor).to(tl.pointer_type(TYPE))
    # Nothing is known about an address from a table. Without the promise loads are one number wide.
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _load(pointer: Arg, at: Arg, remaining: Arg, WHOLE: tl.constexpr) -> Arg:
    numbers = tl.load(pointer + at) if WHOLE else tl.load(pointer + at, mask=at < remaining, other=0.0)
    return numbers.to(tl.float32)


@triton.jit
def _store(pointer: Arg, at: Arg, remaining: Arg, numbers: Arg, WHOLE: tl.constexpr) -> None:
    if WHOLE:
        tl.store(pointer + at, numbers.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer + at, numbers.to(pointer.dtype.element_ty), mask=at < remaining)


@triton.jit
def _update(
    gradient: Arg, master: Arg, first: Arg, second: Arg, copy: Arg, remaining: Arg, number: Arg, divide_by: Arg,
    rate: Arg, beta1: Arg, rest1: Arg, beta2: Arg, rest2: Arg, log_beta1: Arg, log_beta2: Arg, epsilon: Arg,
    decay: Arg, COPIES: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.arange(0, BLOCK)
    incoming = _load(gradient, at, remaining, WHOLE) / divide_by
    wide = _load(master, at, remaining, WHOLE)
    mean = _load(first, at, remaining, WHOLE)
    square = _load(second, at, remaining, WHOLE)
    wide, mean, square = adamw_numbers(
        wide, mean, square, incoming, number, rate, beta1, rest1, beta2, rest2, log_beta1, log_beta2, epsilon, decay
    )
    _store(master, at, remaining, wide, WHOLE)
    _store(first, at, remaining, mean, WHOLE)
    _store(second, at, remaining, square, WHOLE)
    if COPIES:
        _store(copy, at, remaining, wide, WHOLE)


@triton.jit
def adamw_chunks(
    addresses: Arg, tensors: Arg, chunk_table: Arg, chunks: Arg, divide_by: Arg, skip: Arg, rate: Arg, beta1: Arg,
    rest1: Arg, beta2: Arg, rest2: Arg, log_beta1: Arg, log_beta2: Arg, epsilon: Arg, decay: Arg,
    GRADIENT_TYPE: tl.constexpr, COPY_TYPE: tl.constexpr, COPIES: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """Update one block of a chunk in each program. Nothing is read or written where `skip` is 1."""
    chunk = tl.program_id(0) // BLOCKS
    tensor = tl.load(chunk_table + chunk)
    start = (tl.load(chunk_table + chunks + chunk) * BLOCKS + tl.program_id(0) % BLOCKS).to(tl.int64) * BLOCK
    remaining = tl.load(addresses + SIZE * tensors + tensor) - start
    remaining = tl.where(tl.load(skip) > 0, 0, remaining)
    if remaining > 0:
        gradient = _pointer(addresses, tensors, GRADIENT, tensor, GRADIENT_TYPE, ALIGNED) + start
        master = _pointer(addresses, tensors, MASTER, tensor, tl.float32, ALIGNED) + start
        first = _pointer(addresses, tensors, FIRST, tensor, tl.float32, ALIGNED) + start
        second = _pointer(addresses, tensors, SECOND, tensor, tl.float32, ALIGNED) + start
        copy = _pointer(addresses, tensors, COPY, tensor, COPY_TYPE, ALIGNED) + start
        number = tl.load(_pointer(addresses, tensors, STEP, tensor, tl.float32, False))
        divisor = tl.load(divide_by)
        # Whole blocks need no masks, so their loads can be 16 bytes wide.
        if remaining >= BLOCK:
            _update(
                gradient, master, first, second, copy, remaining, number, divisor, rate, beta1, rest1, beta2, rest2,
                log_beta1, log_beta2, epsilon, decay, COPIES, BLOCK, True,
            )  # fmt: skip
        else:
            _update(
                gradient, master, first, second, copy, remaining, number, divisor, rate, beta1, rest1, beta2, rest2,
                log_beta1, log_beta2, epsilon, decay, COPIES, BLOCK, False,
            )  # fmt: skip


@triton.jit
def square_sums(
    addresses: Arg, tensors: Arg, chunk_table: Arg, chunks: Arg, sums: Arg, GRADIENT_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """Sum the squares of one chunk in each program, into `sums` (chunks,)."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_table + chunk)
    start = tl.load(chunk_table + chunks + chunk).to(tl.int64) * (BLOCK * BLOCKS)
    remaining = tl.minimum(tl.load(addresses + tensors + tensor) - start, BLOCK * BLOCKS).to(tl.int32)
    pointer = _pointer(addresses, tensors, 0, tensor, GRADIENT_TYPE, ALIGNED) + start
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    # One sum a chunk, which the caller adds in order: atomics would add in any.
    full = remaining // BLOCK * BLOCK
    for begin in range(0, full, BLOCK):
        numbers = _load(pointer + begin, at, BLOCK, True)
        total += numbers * numbers
    numbers = _load(pointer + full, at, remaining - full, False)
    total += numbers * numbers
    tl.store(sums + chunk, tl.sum(total, 0))


def adamw(
    gradients: Sequence[Tensor], masters: Sequence[Tensor], moments: tuple[Sequence[Tensor], Sequence[Tensor]],
    copies: Sequence[Tensor] | None, steps: Sequence[Tensor], numbers: UpdateNumbers,
) -> None:  # fmt: skip
    """Update as kernels.optimizer.adamw.adamw, for contiguous tensors, each list of one dtype."""
    sizes = tuple(master.numel() for master in masters)
    lists = (gradients, masters, *moments, masters if copies is None else copies)
    table, aligned = _addresses(lists, steps, sizes)
    chunk_table = _chunk_table(sizes, masters[0].device)
    chunks = chunk_table.shape[1]
    adamw_chunks[(chunks * (CHUNK // BLOCK),)](
        table, len(sizes), chunk_table, chunks, numbers.divide_by, numbers.skip, numbers.rate, numbers.beta1,
        1 - numbers.beta1, numbers.beta2, 1 - numbers.beta2, logarithm(numbers.beta1), logarithm(numbers.beta2),
        numbers.epsilon, numbers.decay, GRADIENT_TYPE=TYPES[gradients[0].dtype],
        COPY_TYPE=TYPES[lists[4][0].dtype], COPIES=copies is not None, ALIGNED=aligned, BLOCK=BLOCK,
        BLOCKS=CHUNK // BLOCK, num_warps=4,
    )  # fmt: skip


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return sums of squares (C,) fp32 of contiguous tensors of one dtype, chunk by chunk."""
    sizes = tuple(tensor.numel() for tensor in tensors)
    table, aligned = _addresses((tensors,), (), sizes)
    chunk_table = _chunk_table(sizes, tensors[0].device)
    chunks = chunk_table.shape[1]
    sums = torch.empty(chunks, dtype=torch.float32, device=table.device)
    square_sums[(chunks,)](
        table, len(sizes), chunk_table, chunks, sums, GRADIENT_TYPE=TYPES[tensors[0].dtype], ALIGNED=aligned,
        BLOCK=SUMMED, BLOCKS=CHUNK // SUMMED, num_warps=8,
    )  # fmt: skip
    return sums


def _addresses(
    lists: Sequence[Sequence[Tensor]], steps: Sequence[Tensor], sizes: tuple[int, ...]
) -> tuple[Tensor, bool]:
    """Return a table of addresses, int64 on the device, and whether all in the lists are multiples of WIDEST.

    A row for each list, then the steps where there are any, then the sizes.
    """
    rows = [[tensor.data_ptr() for tensor in tensors] for tensors in lists]
    aligned = all(address % WIDEST == 0 for row in rows for address in row)
    if steps:
        rows.append([step.data_ptr() for step in steps])
    device = lists[0][0].device
    # Pinned, so the copy to the device does not make the host wait.
    table = torch.tensor([*rows, sizes], dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), aligned


@lru_cache(maxsize=64)
def _chunk_table(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the tensor of each chunk and its number within it, (2, chunks) int32."""
    # Chunks of one size give programs about the same work, however large the tensors are.
    counts = torch.tensor([ceil_div(size, CHUNK) for size in sizes])
    tensor = torch.arange(len(sizes)).repeat_interleave(counts)
    number = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
    return torch.stack((tensor, number)).int().to(device)
