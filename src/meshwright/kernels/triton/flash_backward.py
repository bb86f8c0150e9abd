"""The backward pass of flash attention: gradients of queries by blocks of queries, of keys and values by blocks of
keys, each of which no other program writes."""

import triton
import triton.language as tl

from meshwright.kernels.triton.blocks import Arg

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def inner_rows(
    gradient: Arg, out: Arg, inner: Arg, total: Arg, heads: Arg, width: Arg, BLOCK: tl.constexpr
) -> None:  # fmt: skip
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
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            seen = (key[None, :] < length) & (query[:, None] < length)
            if CAUSAL:
                seen = seen & (key[None, :] <= query[:, None])
            weights = tl.where(seen, tl.exp2((scores - sums[:, None]) * LOG2_E), 0.0)
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
        for head in range(shared * GROUP, (shared + 1) * GROUP):
            from_q = q + begin * q_position + head * q_head
            from_out = gradient + (begin * heads + head) * width
            sums_at = head * total + begin
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
