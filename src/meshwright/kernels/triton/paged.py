"""Attention of rows over keys and values that lie in blocks: each row over its own sequence up to its own position.

A program takes a run of SPLIT positions of one row and the query heads of one key head, which are the rows of its
products. It looks up the block of each position, reads each number once, and holds a running maximum and sum in fp32
(Dao et al. 2022, arXiv:2205.14135; split over keys as in Flash-Decoding, Dao et al. 2023). A second kernel adds the
runs of a row, in order.

Runs begin at multiples of SPLIT whatever else is in the call, so a row's bits depend on its own sequence alone.
Positions that a row does not see are not read, nor are blocks beyond its last.

Letters: R rows, H query heads, K key heads, E width of a head, V of its values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, power_of_two, wide_products
from meshwright.spec.plan.execution import SPLIT

WARPS, STAGES = 4, 2
LEAST = 16
"""Rows of the smallest product of tensor cores."""
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)


class BlockStore(NamedTuple):
    """Keys or values of all blocks."""

    codes: Tensor
    """(blocks, positions, K, E) contiguous: numbers, or codes of int8 or e4m3."""
    scales: Tensor | None
    """Scales of codes, (blocks, positions, K) fp32."""


class RowPlaces(NamedTuple):
    """Positions of rows, as in paged_attention.RowsCall."""

    tables: Tensor
    offsets: Tensor
    last: Tensor
    longest: int


@triton.jit
def _numbers(store: Arg, at: Arg, mask: Arg, CODES: tl.constexpr, WIDE: tl.constexpr, dtype: tl.constexpr) -> Arg:
    """Load numbers, or codes as numbers, which 16 bits hold exactly."""
    numbers = tl.load(store + at, mask=mask, other=0)
    if CODES == 2:
        code = numbers.to(tl.int32)
        half = (((code & 0x7F) << 7) | ((code & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True)
        numbers = half.to(tl.float32) * 256.0
    numbers = numbers.to(dtype)
    if WIDE:
        numbers = numbers.to(tl.float32)
    return numbers


@triton.jit
def paged_rows(
    q: Arg, keys: Arg, values: Arg, key_scales: Arg, value_scales: Arg, tables: Arg, offsets: Arg, last: Arg, out: Arg,
    lse: Arg, rows: Arg, scale: Arg, window: Arg, q_row: Arg, q_head: Arg, size: Arg, key_heads: Arg, width: Arg,
    key_width: Arg, value_width: Arg, out_width: Arg, GROUP: tl.constexpr, CODES: tl.constexpr, PARTS: tl.constexpr,
    WIDE: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute out (R, H, V) of one row and key head.

    PARTS: (splits, R, H, V) fp32 of a run, and lse (splits, R, H) base 2.
    """
    row, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(last + row).to(tl.int32) + 1
    first = tl.maximum(0, end - window)
    begin, stop = split * SPLIT, tl.minimum(end, split * SPLIT + SPLIT)
    if begin < end and stop > first:
        table = tables + tl.load(offsets + row)
        head = tl.arange(0, HEADS)
        column = tl.arange(0, BLOCK)
        known = (head[:, None] < GROUP) & (column[None, :] < width)
        at = row.to(tl.int64) * q_row + (key_head * GROUP + head[:, None]) * q_head + column[None, :]
        queries = tl.load(q + at, mask=known, other=0.0)
        if WIDE:
            queries = queries.to(tl.float32)
        peak = tl.full((HEADS,), LOWEST, tl.float32)
        sums = tl.zeros((HEADS,), tl.float32)
        summed = tl.zeros((HEADS, BLOCK), tl.float32)
        for start in range(begin, stop, KEYS):
            position = start + tl.arange(0, KEYS)
            seen = (position >= first) & (position < stop)
            block = tl.load(table + position // size, mask=seen, other=0)
            slot = (block.to(tl.int64) * size + position % size) * key_heads + key_head
            mask = seen[:, None] & (column[None, :] < width)
            key_numbers = _numbers(
                keys, slot[:, None] * key_width + column[None, :], mask, CODES, WIDE, q.dtype.element_ty
            )
            scores = tl.dot(queries, tl.trans(key_numbers), input_precision="ieee") * (scale * LOG2_E)
            if CODES > 0:
                scores *= tl.load(key_scales + slot, mask=seen, other=0.0)[None, :]
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))  # sums so far are rescaled to the new maximum
            weights = tl.exp2(scores - higher[:, None])
            decay = tl.exp2(peak - higher)
            sums = sums * decay + tl.sum(weights, 1)
            if CODES > 0:
                weights *= tl.load(value_scales + slot, mask=seen, other=0.0)[None, :]
            mask = seen[:, None] & (column[None, :] < out_width)
            value_numbers = _numbers(
                values, slot[:, None] * value_width + column[None, :], mask, CODES, WIDE, q.dtype.element_ty
            )
            summed = summed * decay[:, None] + tl.dot(
                weights.to(value_numbers.dtype), value_numbers, input_precision="ieee"
            )
            peak = higher
        summed = summed / sums[:, None]  # a run's own softmax: `add_splits` weighs it by lse
        index = (row.to(tl.int64) * key_heads + key_head) * GROUP + head
        if PARTS:
            index += split.to(tl.int64) * rows * key_heads * GROUP
            tl.store(lse + index, peak + tl.log2(sums), mask=head < GROUP)
        known = (head[:, None] < GROUP) & (column[None, :] < out_width)
        tl.store(out + index[:, None] * out_width + column[None, :], summed.to(out.dtype.element_ty), mask=known)


@triton.jit
def add_splits(
    parts: Arg, lse: Arg, last: Arg, out: Arg, rows: Arg, heads: Arg, width: Arg, window: Arg, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute out (R, H, V) of one row and head: the sum of its runs, each by its share of the weights."""
    row, head = tl.program_id(0), tl.program_id(1)
    end = tl.load(last + row).to(tl.int32) + 1
    first = tl.maximum(0, end - window)
    index = row.to(tl.int64) * heads + head
    step = tl.cast(rows, tl.int64) * heads  # Triton makes a constant of one row, which has no `.to`
    column = tl.arange(0, BLOCK)
    peak = tl.full((1,), LOWEST, tl.float32)
    sums, total = tl.zeros((1,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for split in range(first // SPLIT, (end + SPLIT - 1) // SPLIT):
        split_lse = tl.load(lse + split * step + index)
        higher = tl.maximum(peak, split_lse)
        decay, share = tl.exp2(peak - higher), tl.exp2(split_lse - higher)
        part = tl.load(parts + (split * step + index) * width + column, mask=column < width, other=0.0)
        total = total * decay + part * share
        sums = sums * decay + share
        peak = higher
    tl.store(out + index * width + column, (total / sums).to(out.dtype.element_ty), mask=column < width)


def keys_at_once(width: int) -> int:
    """Return the positions that a program multiplies at a time: 16 KiB of keys in 16 bits, and as many of values."""
    return max(16, min(64, 8192 // max(16, power_of_two(width))))


def attend_rows(
    q: Tensor, keys: BlockStore, values: BlockStore, positions: RowPlaces, *, width: int, window: int, scale: float
) -> Tensor:
    """Attend q (R, H, E) as paged_attention.attend_rows_reference, with sums in fp32. Returns (R, H, width)."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    (rows, heads, head_width), key_heads = q.shape, keys.codes.shape[2]
    block = max(16, power_of_two(head_width))
    splits, window = ceil_div(positions.longest, SPLIT), window or positions.longest
    out = torch.empty((rows, heads, width), dtype=q.dtype, device=q.device)
    parts = lse = out
    if splits > 1:
        parts = torch.empty((splits, rows, heads, width), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, rows, heads), dtype=torch.float32, device=q.device)
    scales = [q if store.scales is None else store.scales for store in (keys, values)]
    paged_rows[(rows, key_heads, splits)](
        q, _codes(keys.codes), _codes(values.codes), *scales, positions.tables, positions.offsets, positions.last,
        parts, lse, rows, scale, window, *q.stride()[:2], keys.codes.shape[1], key_heads, head_width,
        keys.codes.shape[3], values.codes.shape[3], width, GROUP=heads // key_heads, CODES=_form(keys),
        PARTS=splits > 1, WIDE=wide_products(paged_rows, q), SPLIT=SPLIT, HEADS=max(LEAST,
        power_of_two(heads // key_heads)), KEYS=keys_at_once(head_width), BLOCK=block, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        add_splits[(rows, heads)](
            parts, lse, positions.last, out, rows, heads, width, window, SPLIT=SPLIT, BLOCK=block, num_warps=1
        )
    return out


def _form(store: BlockStore) -> int:
    return 0 if store.scales is None else 1 if store.codes.dtype == torch.int8 else 2


def _codes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
