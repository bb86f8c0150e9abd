"""Flash attention (Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691): causal, by documents, grouped heads.

For study, and where torch has no fused kernel. cuDNN's and FlashAttention-3's are faster on Hopper. The S x S weights
are never stored: a block of queries walks over its keys with a running maximum and sum, and stores the log-sum-exp.

The backward pass recomputes the weights. Gradients of queries go by blocks of queries, those of keys and values by
blocks of keys, each summed over the query heads that share it. No two programs write one number, so there are no
atomics, and the same inputs give the same bits.

`merge` adds attention over a part of the keys to the result so far, in place and in one pass (attention/partial.py).

Positions of all documents are laid end to end: q (T, H, E), k and v (T, K, E); `borders` (N + 1,) int32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import Arg, ceil_div, power_of_two, wide_products

LOG2_E = tl.constexpr(1.4426950408889634)
"""Factor of natural exponents for exp2, which is one instruction of a GPU."""
LOWEST = tl.constexpr(-1.0e30)
"""First maximum of a row. With -inf a row without a visible key would subtract infinities."""
QUERIES, KEYS = 64, 64
"""Queries and keys of a block."""
WARPS = 8
"""Warps of a program. With 4 a block of keys and its two sums would not stay in registers."""
BESIDE_KEYS = 32
"""Queries that a block of keys takes at a time, for the same reason."""
MERGED_ROWS = 16
"""Queries of a program that merges."""


@triton.jit
def inner_rows(gradient: Arg, out: Arg, inner: Arg, total: Arg, heads: Arg, width: Arg, BLOCK: tl.constexpr) -> None:
    """Compute inner (H, T) = sum of gradient x out over a head's width; both (T, H, E)."""
    position, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    at = (position * heads + head) * width + column
    incoming = tl.load(gradient + at, mask=column < width, other=0.0).to(tl.float32)
    outcome = tl.load(out + at, mask=column < width, other=0.0).to(tl.float32)
    tl.store(inner + head * total + position, tl.sum(incoming * outcome, 0))


@triton.jit
def _rows(x: Arg, positions: Arg, stride: Arg, length: Arg, width: Arg, WIDE: tl.constexpr, BLOCK: tl.constexpr) -> Arg:
    """Load rows (R, E) of a head at positions of a document. 0 outside."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = (positions[:, None] < length) & (column < width)
    # Positions of all documents times the stride may pass 2^31 numbers.
    rows = tl.load(x + positions[:, None].to(tl.int64) * stride + column, mask=inside, other=0.0)
    return rows.to(tl.float32) if WIDE else rows


@triton.jit
def queries_backward(
    q: Arg, k: Arg, v: Arg, gradient: Arg, lse: Arg, inner: Arg, borders: Arg, total: Arg, scale: Arg, q_gradient: Arg,
    q_position: Arg, q_head: Arg, k_position: Arg, k_head: Arg, v_position: Arg, v_head: Arg, heads: Arg, width: Arg,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the gradient of a block of queries of one head of one document."""
    document, head = tl.program_id(2), tl.program_id(1)
    begin = tl.load(borders + document).to(tl.int64)
    length = (tl.load(borders + document + 1) - begin).to(tl.int32)
    first = tl.program_id(0) * QUERIES
    if first < length:
        query = first + tl.arange(0, QUERIES)
        queries = _rows(q + begin * q_position + head * q_head, query, q_position, length, width, WIDE, BLOCK)
        to_out = (begin * heads + head) * width
        incoming = _rows(gradient + to_out, query, heads * width, length, width, WIDE, BLOCK)
        at = head.to(tl.int64) * total + begin + query
        sums = tl.load(lse + at, mask=query < length, other=0.0)
        inner_sums = tl.load(inner + at, mask=query < length, other=0.0)
        summed = tl.zeros((QUERIES, BLOCK), tl.float32)
        end = tl.minimum(length, first + QUERIES) if CAUSAL else length
        for start in range(0, end, KEYS):
            key = start + tl.arange(0, KEYS)
            shared = head // GROUP
            keys = _rows(k + begin * k_position + shared * k_head, key, k_position, length, width, WIDE, BLOCK)
            values = _rows(v + begin * v_position + shared * v_head, key, v_position, length, width, WIDE, BLOCK)
            # Without "ieee" operands in fp32 would be rounded to TF32.
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            seen = (key[None, :] < length) & (query[:, None] < length)
            if CAUSAL:
                seen = seen & (key[None, :] <= query[:, None])
            weights = tl.where(seen, tl.exp2((scores - sums[:, None]) * LOG2_E), 0.0)
            # Gradient of softmax: the inner product of gradient and result stands for the sum over all keys.
            slopes = weights * (tl.dot(incoming, tl.trans(values), input_precision="ieee") - inner_sums[:, None])
            summed += tl.dot(slopes.to(keys.dtype), keys, input_precision="ieee")
        column = tl.arange(0, BLOCK)[None, :]
        known = (query[:, None] < length) & (column < width)
        here = q_gradient + to_out + query[:, None].to(tl.int64) * heads * width + column
        tl.store(here, (summed * scale).to(q_gradient.dtype.element_ty), mask=known)


@triton.jit
def keys_backward(
    q: Arg, k: Arg, v: Arg, gradient: Arg, lse: Arg, inner: Arg, borders: Arg, total: Arg, scale: Arg, k_gradient: Arg,
    v_gradient: Arg, q_position: Arg, q_head: Arg, k_position: Arg, k_head: Arg, v_position: Arg, v_head: Arg,
    heads: Arg, width: Arg, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the gradients of a block of keys and values of one key head, over the query heads that share it."""
    document, shared = tl.program_id(2), tl.program_id(1)
    begin = tl.load(borders + document).to(tl.int64)
    length = (tl.load(borders + document + 1) - begin).to(tl.int32)
    first = tl.program_id(0) * KEYS
    if first < length:
        key = first + tl.arange(0, KEYS)
        keys = _rows(k + begin * k_position + shared * k_head, key, k_position, length, width, WIDE, BLOCK)
        values = _rows(v + begin * v_position + shared * v_head, key, v_position, length, width, WIDE, BLOCK)
        keys_gradient = tl.zeros((KEYS, BLOCK), tl.float32)
        values_gradient = tl.zeros((KEYS, BLOCK), tl.float32)
        # Heads are added one after the other, in a fixed order. Atomics would add in any.
        for head in range(shared * GROUP, (shared + 1) * GROUP):
            from_q = q + begin * q_position + head * q_head
            from_out = gradient + (begin * heads + head) * width
            sums_at = head * total + begin
            # Queries before the first key of the block do not see it.
            for start in range((first // QUERIES) * QUERIES if CAUSAL else 0, length, QUERIES):
                query = start + tl.arange(0, QUERIES)
                queries = _rows(from_q, query, q_position, length, width, WIDE, BLOCK)
                incoming = _rows(from_out, query, heads * width, length, width, WIDE, BLOCK)
                sums = tl.load(lse + sums_at + query, mask=query < length, other=0.0)
                inner_sums = tl.load(inner + sums_at + query, mask=query < length, other=0.0)
                scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale
                seen = (key[:, None] < length) & (query[None, :] < length)
                if CAUSAL:
                    seen = seen & (key[:, None] <= query[None, :])
                weights = tl.where(seen, tl.exp2((scores - sums[None, :]) * LOG2_E), 0.0)
                values_gradient += tl.dot(weights.to(incoming.dtype), incoming, input_precision="ieee")
                slope = weights * (tl.dot(values, tl.trans(incoming), input_precision="ieee") - inner_sums[None, :])
                keys_gradient += tl.dot(slope.to(queries.dtype), queries, input_precision="ieee")
        column = tl.arange(0, BLOCK)[None, :]
        known = (key[:, None] < length) & (column < width)
        here = ((begin + key[:, None]) * (heads // GROUP) + shared) * width + column
        tl.store(k_gradient + here, (keys_gradient * scale).to(k_gradient.dtype.element_ty), mask=known)
        tl.store(v_gradient + here, values_gradient.to(v_gradient.dtype.element_ty), mask=known)


@triton.jit
def flash_forward(
    q: Arg, k: Arg, v: Arg, out: Arg, lse: Arg, borders: Arg, total: Arg, scale: Arg, q_position: Arg, q_head: Arg,
    k_position: Arg, k_head: Arg, v_position: Arg, v_head: Arg, heads: Arg, width: Arg, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute out (T, H, E) and lse (H, T) of a block of queries of one head of one document."""
    document, head = tl.program_id(2), tl.program_id(1)
    begin = tl.load(borders + document).to(tl.int64)
    length = (tl.load(borders + document + 1) - begin).to(tl.int32)
    first = tl.program_id(0) * QUERIES
    # The grid has blocks for the longest document. Shorter ones leave theirs empty.
    if first < length:
        query = first + tl.arange(0, QUERIES)
        column = tl.arange(0, BLOCK)[None, :]
        known = (query[:, None] < length) & (column < width)
        here = q + (begin + query[:, None]) * q_position + head * q_head + column
        queries = tl.load(here, mask=known, other=0.0)
        if WIDE:
            queries = queries.to(tl.float32)
        peak = tl.full((QUERIES,), LOWEST, tl.float32)
        sums = tl.zeros((QUERIES,), tl.float32)
        summed = tl.zeros((QUERIES, BLOCK), tl.float32)
        end = tl.minimum(length, first + QUERIES) if CAUSAL else length
        for start in range(0, end, KEYS):
            key = start + tl.arange(0, KEYS)
            there = (key[:, None] < length) & (column < width)
            at = (begin + key[:, None]) * k_position + (head // GROUP) * k_head + column
            keys = tl.load(k + at, mask=there, other=0.0)
            at = (begin + key[:, None]) * v_position + (head // GROUP) * v_head + column
            values = tl.load(v + at, mask=there, other=0.0)
            if WIDE:
                keys, values = keys.to(tl.float32), values.to(tl.float32)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * (scale * LOG2_E)
            seen = key[None, :] < length
            if CAUSAL:
                seen = seen & (key[None, :] <= query[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            # Sums so far are rescaled to the new maximum.
            higher = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            decay = tl.exp2(peak - higher)
            sums = sums * decay + tl.sum(weights, 1)
            summed = summed * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            peak = higher
        at = (begin + query[:, None]) * heads * width + head * width + column
        tl.store(out + at, (summed / sums[:, None]).to(out.dtype.element_ty), mask=known)
        # The maximum is in base 2, as the scores are, and the log-sum-exp in base e.
        tl.store(lse + head.to(tl.int64) * total + begin + query, peak / LOG2_E + tl.log(sums), mask=query < length)


def _sizes(q: Tensor) -> dict[str, Any]:
    # A product of tensor cores is at least 16 wide.
    return {"QUERIES": QUERIES, "KEYS": KEYS, "BLOCK": max(16, power_of_two(q.shape[2]))}


def forward(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (T, H, E) in the dtype of q, and the log-sum-exp (H, T) fp32."""
    total, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, total), dtype=torch.float32, device=q.device)
    flash_forward[(ceil_div(longest, QUERIES), heads, len(borders) - 1)](
        q, k, v, out, lse, borders, total, scale, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], heads, width,
        GROUP=heads // k.shape[1], CAUSAL=causal, WIDE=wide_products(flash_forward, q), **_sizes(q), num_warps=WARPS,
        num_stages=2,
    )  # fmt: skip
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, borders: Tensor, longest: int, *,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    total, heads, width = q.shape
    # The kernels walk over gradient and result with the same strides.
    gradient = gradient.contiguous()
    inner = torch.empty((heads, total), dtype=torch.float32, device=q.device)
    inner_rows[(total, heads)](gradient, out, inner, total, heads, width, BLOCK=max(16, power_of_two(width)))
    of_q, of_k, of_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    shared = (q, k, v, gradient, lse, inner, borders, total, scale)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], heads, width)
    options = {
        "GROUP": heads // k.shape[1], "CAUSAL": causal, "WIDE": wide_products(queries_backward, q), **_sizes(q),
        "num_warps": WARPS, "num_stages": 2,
    }  # fmt: skip
    queries_backward[(ceil_div(longest, QUERIES), heads, len(borders) - 1)](*shared, of_q, *strides, **options)
    # A block of keys holds two sums, so it takes fewer queries at a time.
    options["QUERIES"] = min(QUERIES, BESIDE_KEYS)
    keys_backward[(ceil_div(longest, KEYS), k.shape[1], len(borders) - 1)](*shared, of_k, of_v, *strides, **options)
    return of_q, of_k, of_v


class _Flash(torch.autograd.Function):
    """Flash attention that saves q, k, v, the result and its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        # The kernels take strides of positions and heads. Numbers of a head must be contiguous.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = forward(q, k, v, borders, longest, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, borders)
        ctx.longest, ctx.options = longest, {"causal": causal, "scale": scale}
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        q, k, v, out, lse, borders = ctx.saved_tensors
        return *backward(gradient, q, k, v, out, lse, borders, ctx.longest, **ctx.options), None, None, None, None


def attend(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, *, causal: bool = True, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend q (T, H, E) over k and v (T, K, E) of documents: (T, H, E), and log-sum-exp (H, T)."""
    attended: tuple[Tensor, Tensor] = _Flash.apply(q, k, v, borders, longest, causal, scale)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return attended


@triton.jit
def merge_rows(
    out: Arg, out_batch: Arg, out_head: Arg, out_query: Arg, lse: Arg, lse_batch: Arg, lse_head: Arg, lse_query: Arg,
    part: Arg, part_batch: Arg, part_head: Arg, part_query: Arg, part_lse: Arg, shift: Arg, queries: Arg, heads: Arg,
    width: Arg, tiles: Arg, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Set out = out exp(lse - both) + part exp(shift - both); both = log(exp lse + exp part_lse) becomes lse."""
    at = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = at // heads, at % heads
    query = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_query = query < queries
    old_at = lse + batch * lse_batch + head * lse_head + query * lse_query
    old = tl.load(old_at, mask=is_query, other=0.0)
    new = tl.load(part_lse + at * queries + query, mask=is_query, other=0.0)
    new_shift = tl.load(shift + at * queries + query, mask=is_query, other=0.0)
    peak = tl.maximum(old, new)
    safe = tl.where(peak == float("-inf"), 0.0, peak)  # neither has seen a key
    both = safe + tl.log(tl.exp(old - safe) + tl.exp(new - safe))
    tl.store(old_at, both, mask=is_query)
    seen = both != float("-inf")
    # A query that has seen no key has a log-sum-exp of -inf, and its shares are 0.
    old_share = tl.where(seen, tl.exp(old - tl.where(seen, both, 0.0)), 0.0)[:, None]
    new_share = tl.where(seen, tl.exp(new_shift - tl.where(seen, both, 0.0)), 0.0)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = is_query[:, None] & (column < width)
    here = out + batch * out_batch + head * out_head + query[:, None] * out_query + column
    there = part + batch * part_batch + head * part_head + query[:, None] * part_query + column
    merged = tl.load(here, mask=inside, other=0.0) * old_share
    merged += tl.load(there, mask=inside, other=0.0).to(tl.float32) * new_share
    tl.store(here, merged, mask=inside)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, shift: Tensor) -> None:
    """Merge as kernels.partial._merge: out (B, H, S, V) fp32 and lse (B, H, S) in place."""
    batch, heads, queries, width = out.shape
    part = part if part.stride(-1) == 1 else part.contiguous()
    tiles = ceil_div(queries, MERGED_ROWS)
    merge_rows[(tiles * batch * heads,)](
        out, *out.stride()[:3], lse, *lse.stride(), part, *part.stride()[:3], part_lse.contiguous(),
        shift.contiguous(), queries, heads, width, tiles, ROWS=MERGED_ROWS, BLOCK=power_of_two(width), num_warps=4,
    )  # fmt: skip
