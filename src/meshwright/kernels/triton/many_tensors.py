"""AdamW with fp32 states, and sums of squares, over many tensors in one launch. Each number is read and written once.

A launch gets addresses, not tensors: a table of them is copied to the device before. Tensors are cut into chunks of
BLOCKS blocks, and a second table maps chunks to tensors. Where all addresses are multiples of 16 bytes, as those of
tensors with separate memory are, loads are 16 bytes wide.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import ELEMENTS, Arg, ceil_div
from meshwright.kernels.triton.narrow_piece import UpdateNumbers
from meshwright.kernels.triton.narrow_update import adamw_numbers, logarithm

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


@triton.jit
def _pointer(
    addresses: Arg, tensors: Arg, row: tl.constexpr, tensor: Arg, TYPE: tl.constexpr, ALIGNED: tl.constexpr
) -> Arg:
    pointer = tl.load(addresses + row * tensors + tensor).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _load(pointer: Arg, at: Arg, left: Arg, WHOLE: tl.constexpr) -> Arg:
    numbers = tl.load(pointer + at) if WHOLE else tl.load(pointer + at, mask=at < left, other=0.0)
    return numbers.to(tl.float32)


@triton.jit
def _store(pointer: Arg, at: Arg, left: Arg, numbers: Arg, WHOLE: tl.constexpr) -> None:
    if WHOLE:
        tl.store(pointer + at, numbers.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer + at, numbers.to(pointer.dtype.element_ty), mask=at < left)


@triton.jit
def _update(
    gradient: Arg, master: Arg, first: Arg, second: Arg, copy: Arg, left: Arg, number: Arg, divide_by: Arg, rate: Arg,
    beta1: Arg, rest1: Arg, beta2: Arg, rest2: Arg, log_beta1: Arg, log_beta2: Arg, epsilon: Arg, decay: Arg,
    COPIES: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.arange(0, BLOCK)
    incoming = _load(gradient, at, left, WHOLE) / divide_by
    wide = _load(master, at, left, WHOLE)
    mean = _load(first, at, left, WHOLE)
    square = _load(second, at, left, WHOLE)
    wide, mean, square = adamw_numbers(
        wide, mean, square, incoming, number, rate, beta1, rest1, beta2, rest2, log_beta1, log_beta2, epsilon, decay
    )
    _store(master, at, left, wide, WHOLE)
    _store(first, at, left, mean, WHOLE)
    _store(second, at, left, square, WHOLE)
    if COPIES:
        _store(copy, at, left, wide, WHOLE)


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
    left = tl.load(addresses + SIZE * tensors + tensor) - start
    left = tl.where(tl.load(skip) > 0, 0, left)
    if left > 0:
        gradient = _pointer(addresses, tensors, GRADIENT, tensor, GRADIENT_TYPE, ALIGNED) + start
        master = _pointer(addresses, tensors, MASTER, tensor, tl.float32, ALIGNED) + start
        first = _pointer(addresses, tensors, FIRST, tensor, tl.float32, ALIGNED) + start
        second = _pointer(addresses, tensors, SECOND, tensor, tl.float32, ALIGNED) + start
        copy = _pointer(addresses, tensors, COPY, tensor, COPY_TYPE, ALIGNED) + start
        number = tl.load(_pointer(addresses, tensors, STEP, tensor, tl.float32, False))
        divisor = tl.load(divide_by)
        # Whole blocks need no masks, so their loads can be 16 bytes wide.
        if left >= BLOCK:
            _update(
                gradient, master, first, second, copy, left, number, divisor, rate, beta1, rest1, beta2, rest2,
                log_beta1, log_beta2, epsilon, decay, COPIES, BLOCK, True,
            )  # fmt: skip
        else:
            _update(
                gradient, master, first, second, copy, left, number, divisor, rate, beta1, rest1, beta2, rest2,
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
    left = tl.minimum(tl.load(addresses + tensors + tensor) - start, BLOCK * BLOCKS).to(tl.int32)
    pointer = _pointer(addresses, tensors, 0, tensor, GRADIENT_TYPE, ALIGNED) + start
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    whole = left // BLOCK * BLOCK
    for begin in range(0, whole, BLOCK):
        numbers = _load(pointer + begin, at, BLOCK, True)
        total += numbers * numbers
    numbers = _load(pointer + whole, at, left - whole, False)
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
