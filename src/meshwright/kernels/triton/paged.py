"""Attention over a paged cache, and the write into it: each row over its own sequence up to its own position.

A program takes a run of SPLIT positions of one row and the query heads of one key head, which are the rows of its
products. It looks up the block of each position, reads each number once, and holds a running maximum and sum in fp32
(Dao et al. 2022, arXiv:2205.14135; split over keys as in Flash-Decoding, Dao et al. 2023). A second kernel adds the
runs of a row, in order.

Runs begin at multiples of SPLIT whatever else is in the call, so a row's bits depend on its own sequence alone.
Positions that a row does not see are not read, nor are blocks beyond its last.

`rotate_and_store` norms and rotates queries and keys and writes keys and values into the cache, in one kernel. It
replaces five: two norms, the rotation, and a write of keys and of values, each of which reads what the one before has
written. A program takes one row and one key head, with the query heads that read it. Numbers are rounded where the
single kernels round them, which gives the same bits.

Letters: R or N rows, H query heads, K key heads, E width of a head, V of its values.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, power_of_two, wide_products
from meshwright.kernels.triton.code_words import e4m3_code
from meshwright.spec.plan.execution import SPLIT

WARPS, STAGES = 4, 2
WRITE_WARPS = 2
"""Warps of `rotate_and_store`."""
LEAST = 16
"""Rows of the smallest product of tensor cores."""
LOG2_E = tl.constexpr(1.4426950408889634)
"""Factor of natural exponents for exp2, which is one instruction of a GPU."""
LOWEST = tl.constexpr(-1.0e30)
"""First maximum of a row. With -inf a row without a visible key would subtract infinities."""


class BlockStore(NamedTuple):
    """Keys or values of all blocks."""

    codes: Tensor
    """(blocks, positions, K, E) contiguous: numbers, or codes of int8 or e4m3."""
    scales: Tensor | None
    """Scales of codes, (blocks, positions, K) fp32."""


class RowPlaces(NamedTuple):
    """Positions of rows, as in attention/paged.py:RowsCall."""

    tables: Tensor
    offsets: Tensor
    last: Tensor
    longest: int


@triton.jit
def _numbers(store: Arg, at: Arg, mask: Arg, CODES: tl.constexpr, WIDE: tl.constexpr, dtype: tl.constexpr) -> Arg:
    """Load numbers, or codes as numbers, which 16 bits hold exactly."""
    numbers = tl.load(store + at, mask=mask, other=0)
    if CODES == 2:
        # Triton converts e4m3 from sm_89 on only, so its bits become those of fp16.
        # The exponent's bias is 8 less, for which 256 makes up. Subnormal numbers come out right too.
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
    # The grid has runs for the longest row. Runs behind a row's end or before its window stay unwritten.
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
            # Numbers of a cache pass 2^31: slots count in 64 bits.
            slot = (block.to(tl.int64) * size + position % size) * key_heads + key_head
            mask = seen[:, None] & (column[None, :] < width)
            key_numbers = _numbers(
                keys, slot[:, None] * key_width + column[None, :], mask, CODES, WIDE, q.dtype.element_ty
            )
            scores = tl.dot(queries, tl.trans(key_numbers), input_precision="ieee") * (scale * LOG2_E)
            # One scale for a whole key: it multiplies its score, not each of its numbers.
            if CODES > 0:
                scores *= tl.load(key_scales + slot, mask=seen, other=0.0)[None, :]
            scores = tl.where(seen[None, :], scores, float("-inf"))
            # Sums so far are rescaled to the new maximum.
            higher = tl.maximum(peak, tl.max(scores, 1))
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
        # The softmax of this run alone: `add_splits` weighs it by its log-sum-exp.
        summed = summed / sums[:, None]
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
    # Triton makes a constant of one row, which has no `.to`.
    step = tl.cast(rows, tl.int64) * heads
    column = tl.arange(0, BLOCK)
    peak = tl.full((1,), LOWEST, tl.float32)
    sums, total = tl.zeros((1,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    # In the order of positions, so a row has the same bits in every batch.
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
        keys.codes.shape[3], values.codes.shape[3], width, GROUP=heads // key_heads, CODES=_code_format(keys),
        PARTS=splits > 1, WIDE=wide_products(paged_rows, q), SPLIT=SPLIT, HEADS=max(LEAST,
        power_of_two(heads // key_heads)), KEYS=keys_at_once(head_width), BLOCK=block, num_warps=WARPS,
        num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        add_splits[(rows, heads)](
            parts, lse, positions.last, out, rows, heads, width, window, SPLIT=SPLIT, BLOCK=block, num_warps=1
        )
    return out


def _code_format(store: BlockStore) -> int:
    return 0 if store.scales is None else 1 if store.codes.dtype == torch.int8 else 2


def _codes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


class HeadNorms(NamedTuple):
    """RMSNorm of each head of queries and keys."""

    q_weight: Tensor
    k_weight: Tensor
    """(E,) each."""
    eps: float


@triton.jit
def _normed(
    first: Arg, second: Arg, weight: Arg, pair: Arg, other: Arg, half: Arg, eps: Arg, STEP: tl.constexpr
) -> Arg:
    """Divide both halves of heads (HEADS, BLOCK) fp32 by their root mean square, and multiply by the weight."""
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2.0 * half) + eps)[:, None]
    inside = pair < half
    factor = tl.load(weight + pair * STEP, mask=inside, other=0.0).to(tl.float32)
    factor_other = tl.load(weight + pair * STEP + other, mask=inside, other=0.0).to(tl.float32)
    return first * scale * factor, second * scale * factor_other


@triton.jit
def _turned(
    x: Arg, heads: Arg, stride: Arg, cos: Arg, sin: Arg, weight: Arg, half: Arg, eps: Arg, NORM: tl.constexpr,
    STEP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
) -> Arg:  # fmt: skip
    """Normalize and rotate pairs of so many heads, rounded to the dtype of x."""
    pair = tl.arange(0, BLOCK)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    other = half if STEP == 1 else 1
    inside = (head < heads) & (pair < half)
    at = head * stride + pair * STEP
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + other, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        first, second = _normed(first, second, weight, pair, other, half, eps, STEP)
        # Rounded between norm and rotation, as two kernels would round.
        first = first.to(x.dtype.element_ty).to(tl.float32)
        second = second.to(x.dtype.element_ty).to(tl.float32)
    turned = (first * cos - second * sin).to(x.dtype.element_ty)
    turned_other = (second * cos + first * sin).to(x.dtype.element_ty)
    return turned, turned_other


@triton.jit
def _code(numbers: Arg, scale: Arg, CODES: tl.constexpr) -> Arg:
    """Encode numbers. CODES 1: integers, halves to the even one; 2: e4m3."""
    # Triton's plain division is not correctly rounded, and torch's is.
    scaled = tl.div_rn(numbers, scale)
    if CODES == 1:
        # Adding 1.5 x 2^23 leaves fp32 no bits for fractions, so the sum is rounded, halves to even.
        rounded = (scaled + 12582912.0) - 12582912.0
        codes = tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)
    else:
        codes = e4m3_code(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
    return codes


@triton.jit
def _keep(
    first: Arg, second: Arg, store: Arg, scales: Arg, slot: Arg, width: Arg, at: Arg, other: Arg, inside: Arg,
    CODES: tl.constexpr,
) -> None:  # fmt: skip
    """Write both halves of a head (1, BLOCK) to a slot of the cache, as numbers or as codes with a scale."""
    target = store + slot * width + at
    if CODES == 0:
        tl.store(target, first.to(store.dtype.element_ty), mask=inside)
        tl.store(target + other, second.to(store.dtype.element_ty), mask=inside)
    else:
        first, second = first.to(tl.float32), second.to(tl.float32)
        peak = tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(second)))
        scale = tl.div_rn(peak, 127.0 if CODES == 1 else 448.0)
        # Zeros alone have any scale, but 0 would divide them by it.
        scale = tl.where(scale == 0.0, 1.0, scale)
        # A maximum passes over NaN. A scale of NaN makes all numbers that are read NaN, too.
        has_nan = tl.max((first != first).to(tl.int32)) + tl.max((second != second).to(tl.int32))
        scale = tl.where(has_nan > 0, float("nan"), scale)
        tl.store(scales + slot, scale)
        tl.store(target, _code(first, scale, CODES), mask=inside)
        tl.store(target + other, _code(second, scale, CODES), mask=inside)


@triton.jit
def keep_rows(
    q: Arg, q_row: Arg, q_head: Arg, k: Arg, k_row: Arg, k_head: Arg, v: Arg, v_row: Arg, v_head: Arg, cos: Arg,
    sin: Arg, table_row: Arg, slots: Arg, q_weight: Arg, k_weight: Arg, eps: Arg, keys: Arg, values: Arg,
    key_scales: Arg, value_scales: Arg, group: Arg, key_heads: Arg, half: Arg, NORM: tl.constexpr, STEP: tl.constexpr,
    CODES: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Process one row and key head. q and k are overwritten; keys and values (slots, K, E) have a row at each slot."""
    row, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK)[None, :]
    inside = pair < half
    other = half if STEP == 1 else 1
    cosine = tl.load(cos + row * table_row + pair, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + row * table_row + pair, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + row) * key_heads + key_head
    width, at = 2 * half, pair * STEP
    queries = q + row * q_row + key_head * group * q_head
    first, second = _turned(queries, group, q_head, cosine, sine, q_weight, half, eps, NORM, STEP, HEADS, BLOCK)
    head = tl.arange(0, HEADS)[:, None]
    to = queries + head * q_head + at
    mask = (head < group) & inside
    tl.store(to, first, mask=mask)
    tl.store(to + other, second, mask=mask)
    # Keys are rotated in place too: the rows of a prompt read them from here, not from the cache.
    key = k + row * k_row + key_head * k_head
    first, second = _turned(key, 1, k_head, cosine, sine, k_weight, half, eps, NORM, STEP, 1, BLOCK)
    tl.store(key + at, first, mask=inside)
    tl.store(key + at + other, second, mask=inside)
    _keep(first, second, keys, key_scales, slot, width, at, other, inside, CODES)
    values_at = v + row * v_row + key_head * v_head + at
    first = tl.load(values_at, mask=inside, other=0.0)
    second = tl.load(values_at + other, mask=inside, other=0.0)
    _keep(first, second, values, value_scales, slot, width, at, other, inside, CODES)


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: BlockStore, values: BlockStore, *,
    interleaved: bool, norms: HeadNorms | None,
) -> None:  # fmt: skip
    """Norm (if `norms`) and rotate q (N, H, E) and k (N, K, E) in place, and write k and v to slots (N,) of the stores.

    cos and sin are (N, E / 2).
    """
    (rows, heads, width), key_heads = q.shape, k.shape[1]
    group, half = heads // key_heads, width // 2
    # Placeholders without norms: the kernel does not read them.
    weights = (q, k, 0.0) if norms is None else norms
    scales = [cos if store.scales is None else store.scales for store in (keys, values)]
    keep_rows[(rows, key_heads)](
        q, *q.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], cos, sin, cos.stride(0), slots, *weights,
        _codes(keys.codes), _codes(values.codes), *scales, group, key_heads, half, NORM=norms is not None,
        STEP=2 if interleaved else 1, CODES=_code_format(keys), HEADS=power_of_two(group), BLOCK=power_of_two(half),
        num_warps=WRITE_WARPS,
    )  # fmt: skip


def is_taken(*rows: Tensor) -> bool:
    """Return whether heads of these rows (N, heads, E) are contiguous in memory, as the kernel reads them."""
    return all(x.stride(-1) == 1 and x.dtype in (torch.bfloat16, torch.float16, torch.float32) for x in rows)
