"""Attention of packed documents and windows in fp32 on a GPU, whose flash kernels take 16-bit numbers only.

Strips of queries, each with the keys that one of them may see, run in torch's memory-efficient kernel (Rabe and Staats
2021, arXiv:2112.05682). Masks are made for one strip at a time, forward and backward: QUERIES x S numbers, never S x S.
The host knows what a strip can see (the window, the longest document), so nothing waits for the device.

Letters: B batch, S sequence, H query heads, K key heads, E and V widths; R queries and T keys of a strip.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.attention.blockwise import RowTile
from meshwright.kernels.attention.partial import fused_width, padded

QUERIES = 512
"""Queries of a strip: few enough that hidden pairs cost little, enough to fill a GPU."""
APART = 16
"""Multiple to which rows of a bias are padded."""
SUMS = 32
"""Multiple to which rows of the log-sum-exp are padded."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *, longest: int, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend q (B, S, H, E) over k (B, S, K, E) and v (B, S, K, V).

    Returns (B, S, H, V), and the log-sum-exp (B, H, S up to a multiple of 32).

    Args:
        documents: (B, S), ascending along a row, of at most `longest` positions.
        window: Visible positions. 0 = all.
    """
    batch, length, heads = q.shape[:3]
    out = q.new_empty(batch, length, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, -(-length // SUMS) * SUMS, dtype=torch.float32)
    for tile in strips(length, longest, window):
        bias = _bias(tile, documents, window, q)
        part, sums = compat.efficient_attention(*_read(q, k, v, tile), bias, causal=bias is None, scale=scale)
        out[:, tile.queries] = part.transpose(1, 2)[..., : v.shape[-1]]
        lse[..., tile.queries.start : tile.queries.start + sums.shape[-1]] = sums
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, *,
    longest: int, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    of_q = q.new_empty(q.shape)
    of_k, of_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    for tile in strips(q.shape[1], longest, window):
        bias = _bias(tile, documents, window, q)
        incoming, outcome = (_wide(x[:, tile.queries]) for x in (gradient, out))
        start, count = tile.queries.start, tile.queries.stop - tile.queries.start
        sums = lse[..., start : start + -(-count // SUMS) * SUMS].contiguous()
        gradients = compat.efficient_attention_backward(
            incoming, *_read(q, k, v, tile), bias, outcome, sums, causal=bias is None, scale=scale
        )
        of_q[:, tile.queries] = gradients[0].transpose(1, 2)[..., : q.shape[-1]]
        for total, part in ((of_k, gradients[1]), (of_v, gradients[2])):
            per_head = part.transpose(1, 2)[..., : total.shape[-1]]
            total[:, tile.keys] += per_head.unflatten(2, (total.shape[2], -1)).sum(3)
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def strips(length: int, longest: int, window: int) -> Iterator[RowTile]:
    """Yield strips of all rows. A query sees `longest` positions at most, and those of its window."""
    reach = min(window or length, longest, length)
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        yield RowTile(slice(None), slice(start, stop), slice(max(0, start - reach + 1), stop))


def _read(q: Tensor, k: Tensor, v: Tensor, tile: RowTile) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (B, H, R, E), keys and values (B, H, T, .), one per query head, as the kernel takes them."""
    group = q.shape[2] // k.shape[2]
    keys, values = (x[:, tile.keys].repeat_interleave(group, dim=2) if group > 1 else x[:, tile.keys] for x in (k, v))
    return _wide(q[:, tile.queries]), _wide(keys), _wide(values)


def _wide(x: Tensor) -> Tensor:
    """Transpose (B, R, H, E) to (B, H, R, E), padded to a width that the kernel reads."""
    return padded(x, fused_width(x.shape[-1])).transpose(1, 2)


def _bias(tile: RowTile, documents: Tensor | None, window: int, like: Tensor) -> Tensor | None:
    """Return (B, H, R, T), -inf where hidden. None where only later keys are hidden."""
    if documents is None and tile.is_causal(window):
        return None
    hidden = tile.hidden(window, like.device)[None]
    if documents is not None:
        hidden = hidden | (documents[:, tile.queries, None] != documents[:, None, tile.keys])
    size = (*hidden.shape[:2], -(-hidden.shape[2] // APART) * APART)
    bias = like.new_zeros(size)[..., : hidden.shape[2]].masked_fill_(hidden, float("-inf"))
    return bias[:, None].expand(like.shape[0], like.shape[2], -1, -1)
