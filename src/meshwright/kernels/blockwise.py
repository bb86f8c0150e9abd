"""Causal attention by blocks of queries, for CPUs on which torch's fused kernel is slow.

Each block multiplies only the keys it may see (half the work of the whole square), in products large enough for the
matrix library; query heads that share a key head are one product. Nothing of size S x T is kept: the backward pass
makes the weights of a block again. Measured on an AVX2 machine: docs/benchmarks.md.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright import compat

BLOCK = 64
"""Queries of a block: 64 x T weights of a few heads stay in the second-level cache."""


def _weights(q: Tensor, k: Tensor, start: int, allowed: Tensor | None) -> Tensor:
    """Softmax weights (B K, G R, T') of query rows start .. start + R - 1; q is scaled. See `_Blockwise` for shapes."""
    rows, end = q.shape[2], k.shape[1]
    scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2))
    view = scores.view(q.shape[0], q.shape[1], rows, end)
    if allowed is None:
        hidden = torch.ones(rows, end - start, dtype=torch.bool, device=q.device).triu_(1)
        view[..., start:].masked_fill_(hidden, float("-inf"))
    else:
        part = ~allowed[:, :, start : start + rows, :end]
        keys = q.shape[0] // part.shape[0]
        view.unflatten(0, (part.shape[0], keys)).masked_fill_(part.unsqueeze(1), float("-inf"))
    return scores.softmax(-1)


def _grouped(x: Tensor, keys: int) -> Tensor:
    """(B, S, H, E) -> (B K, G, S, E) with H = K G, contiguous."""
    batch, length, heads, width = x.shape
    split = x.view(batch, length, keys, heads // keys, width) if x.is_contiguous() else x.unflatten(2, (keys, -1))
    return split.permute(0, 2, 3, 1, 4).reshape(batch * keys, heads // keys, length, width)


def _ungrouped(x: Tensor, batch: int) -> Tensor:
    """(B K, G, S, E) -> (B, S, H, E)."""
    out: Tensor = x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out


def _prepared(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """In fp32: queries (B K, G, S, E) scaled, keys and values (B K, S, E)."""
    keys = k.shape[2]
    return _grouped(q.float(), keys) * scale, _grouped(k.float(), keys)[:, 0], _grouped(v.float(), keys)[:, 0]


class _Blockwise(torch.autograd.Function):
    """q (B, S, H, E), k (B, S, K, E), v (B, S, K, V); allowed (B or 1, 1, S, S) bool or None = causal."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, allowed)
        ctx.scale = scale
        batch = q.shape[0]
        queries, k, v = _prepared(q, k, v, scale)
        out = queries.new_empty(*queries.shape[:3], v.shape[-1])
        for start in range(0, q.shape[1], BLOCK):
            block = queries[:, :, start : start + BLOCK]
            end = start + block.shape[2]
            weights = _weights(block, k[:, :end], start, allowed)
            out[:, :, start:end] = torch.bmm(weights, v[:, :end]).view(*block.shape[:3], -1)
        return _ungrouped(out, batch).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, allowed = ctx.saved_tensors
        keys, batch, dtype = k.shape[2], q.shape[0], q.dtype
        queries, k, v = _prepared(q, k, v, ctx.scale)
        gradients = _grouped(gradient.float(), keys)
        q_gradient, k_gradient, v_gradient = torch.empty_like(queries), torch.zeros_like(k), torch.zeros_like(v)
        for start in range(0, q.shape[1], BLOCK):
            block = queries[:, :, start : start + BLOCK]
            end = start + block.shape[2]
            flat, out_gradient = block.flatten(1, 2), gradients[:, :, start:end].flatten(1, 2)
            weights = _weights(block, k[:, :end], start, allowed)
            v_gradient[:, :end] += torch.bmm(weights.transpose(1, 2), out_gradient)
            score_gradient = torch.bmm(out_gradient, v[:, :end].transpose(1, 2))
            score_gradient = compat.softmax_backward(score_gradient, weights)
            q_gradient[:, :, start:end] = torch.bmm(score_gradient, k[:, :end]).view_as(block)
            k_gradient[:, :end] += torch.bmm(score_gradient.transpose(1, 2), flat)
        return (
            _ungrouped(q_gradient.mul_(ctx.scale), batch).to(dtype),
            _ungrouped(k_gradient.unsqueeze(1), batch).to(dtype),
            _ungrouped(v_gradient.unsqueeze(1), batch).to(dtype),
            None,
            None,
        )


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, *, scale: float) -> Tensor:
    """Attention of as many queries as keys; 16-bit inputs are widened inside and the result rounded once."""
    result: Tensor = _Blockwise.apply(q, k, v, allowed, scale)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return result
