"""Norm and rotation of queries and keys, and the write of keys and values into a paged cache, in one kernel.

It replaces six: two norms, the rotation, and a write of keys and of values, each of which reads what the one before has
written. A program takes one row and one key head, with the query heads that read it. Numbers are rounded where the
single kernels round them, which gives the same bits.

Letters: N rows, H query heads, K key heads, E width of a head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, power_of_two
from meshwright.kernels.triton.code_words import e4m3_code
from meshwright.kernels.triton.paged import BlockStore, _codes, _form

WARPS = 2


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
        first = first.to(x.dtype.element_ty).to(tl.float32)
        second = second.to(x.dtype.element_ty).to(tl.float32)
    turned = (first * cos - second * sin).to(x.dtype.element_ty)
    turned_other = (second * cos + first * sin).to(x.dtype.element_ty)
    return turned, turned_other


@triton.jit
def _code(numbers: Arg, scale: Arg, CODES: tl.constexpr) -> Arg:
    """Encode numbers. CODES 1: integers, halves to the even one; 2: e4m3."""
    scaled = tl.div_rn(numbers, scale)
    if CODES == 1:  # adding 1.5 x 2^23 rounds
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


def turn_and_keep(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: BlockStore, values: BlockStore, *,
    interleaved: bool, norms: HeadNorms | None,
) -> None:  # fmt: skip
    """Rotate q (N, H, E) and k (N, K, E) in place, and write k and v (N, K, E) to slots (N,) of the stores.

    cos and sin (N, E / 2).
    """
    (rows, heads, width), key_heads = q.shape, k.shape[1]
    group, half = heads // key_heads, width // 2
    # Without norms any tensors do: the kernel reads none of them.
    weights = (q, k, 0.0) if norms is None else norms
    scales = [cos if store.scales is None else store.scales for store in (keys, values)]
    keep_rows[(rows, key_heads)](
        q, *q.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], cos, sin, cos.stride(0), slots, *weights,
        _codes(keys.codes), _codes(values.codes), *scales, group, key_heads, half, NORM=norms is not None,
        STEP=2 if interleaved else 1, CODES=_form(keys), HEADS=power_of_two(group), BLOCK=power_of_two(half),
        num_warps=WARPS,
    )  # fmt: skip


def is_taken(*rows: Tensor) -> bool:
    """Return whether heads of these rows (N, heads, E) are contiguous in memory, as the kernel reads them."""
    return all(x.stride(-1) == 1 and x.dtype in (torch.bfloat16, torch.float16, torch.float32) for x in rows)
