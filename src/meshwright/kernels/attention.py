"""Attention behind one function: softmax(q k^T * scale + mask) v, causal."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.blockwise import blockwise_attention
from meshwright.kernels.linear import needs_wide
from meshwright.kernels.target import acts, kind

LONG = 256 * 64
"""Positions times dims of a head (64 at most) from which on blocks of queries pay."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Who sees whom. `allowed` (B or 1, 1, S, T) bool, or None = plainly causal with S == T."""

    allowed: Tensor | None = None


def causal_mask(
    queries: int, keys: int, *, window: int = 0, documents: Tensor | None = None, device: torch.device | None = None
) -> Mask:
    """The mask of the last `queries` positions over `keys` positions.

    `window`: a query sees itself and the window - 1 before it. `documents` (B, keys) int: no sight across documents.
    Plain causality over all positions needs no tensor and stays None.
    """
    if documents is None and queries == keys and (window == 0 or window >= keys):
        return Mask()
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    allowed = key <= query
    if window:
        allowed = allowed & (key > query - window)
    allowed = allowed[None, None]
    if documents is not None:
        same = documents[:, -queries:, None] == documents[:, None, :]
        allowed = allowed & same[:, None]
    return Mask(allowed)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, dropout: float = 0.0) -> Tensor:
    """q (B, S, H, E), k (B, T, K, E), v (B, T, K, V) -> (B, S, H, V); query head h reads key head h // (H / K)."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bshe,bthe->bhst", q.float(), k.float()) * scale
    allowed = mask.allowed
    if allowed is None:
        allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    weights = F.dropout(weights, dropout)
    return torch.einsum("bhst,bthv->bshv", weights, v.float()).to(q.dtype)


def _expand(x: Tensor, heads: int) -> Tensor:
    """(B, T, K, E) -> (B, T, H, E), each head H / K times."""
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def prefers_blockwise(q: Tensor) -> bool:
    """Whether the blockwise form beats torch's fused kernel here. It does by 1.1 to 1.5 on AVX2 from 256 positions of
    64 dims on, and loses as much below, where its products are small; wider vectors are left to torch's kernel, which
    was written for them, and so is compiled code: the compiler sees through it."""
    if kind(q) != "cpu" or torch.compiler.is_compiling() or q.shape[1] * min(q.shape[3], 64) < LONG:
        return False
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, dropout: float = 0.0) -> Tensor:
    """As the reference, without ever storing the S x T weights: torch's scaled_dot_product_attention, or the blockwise
    form where that is faster (training on a CPU below AVX-512).

    On a GPU flash attention alone takes unequal heads, and neither masks nor fp32 nor heads wider than 256: torch would
    fall back to the S x T form, so keys and values are repeated first. A CPU without 16-bit matrix units attends in
    fp32. Values narrower than the keys (MLA) are padded with zeros for the fused CPU kernel, which wants equal widths;
    the padding is cut off again.
    """
    dtype, width = q.dtype, v.shape[-1]
    if runs_blockwise(q, k, dropout):
        return blockwise_attention(q, k, v, mask.allowed, scale=scale)
    q, k, v, grouped = _as_taken(q, k, v, mask)
    fused = compat.cuda_attention if acts() == "cuda" else F.scaled_dot_product_attention
    out: Tensor = fused(
        q, k, v, attn_mask=mask.allowed, dropout_p=dropout, is_causal=mask.allowed is None, scale=scale,
        enable_gqa=grouped,
    )  # fmt: skip
    return out.transpose(1, 2)[..., :width].to(dtype)


def runs_blockwise(q: Tensor, k: Tensor, dropout: float) -> bool:
    """Whether `attend` takes the blockwise form for q (B, S, H, E) and k (B, T, K, E)."""
    return q.shape[1] == k.shape[1] and not dropout and q.requires_grad and prefers_blockwise(q)


def backend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, dropout: float = 0.0) -> str:
    """Which kernel `attend` runs for the same arguments: blockwise, or torch's flash, cudnn, efficient or math."""
    if runs_blockwise(q, k, dropout):
        return "blockwise"
    q, k, v, grouped = _as_taken(q, k, v, mask)
    if acts() == "cuda":
        return "flash" if mask.allowed is None and compat.takes_flash(q, v) else "efficient"
    return compat.chosen_attention(q, k, v, mask.allowed, dropout=dropout, scale=scale, grouped=grouped)


def _as_taken(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor, bool]:
    """q, k, v (B, heads, positions, width) as torch's fused kernels take them here, and whether heads are unequal."""
    if needs_wide(q):
        q, k, v = q.float(), k.float(), v.float()
    grouped = q.shape[2] != k.shape[2]
    if grouped and kind(q) == "cuda" and not (mask.allowed is None and compat.takes_flash(q, v)):
        k, v, grouped = _expand(k, q.shape[2]), _expand(v, q.shape[2]), False
    if kind(q) == "cpu" and v.shape[-1] < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), grouped
