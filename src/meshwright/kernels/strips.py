"""Attention of packed documents and windows in fp32 on a GPU, whose flash kernels take 16-bit numbers only: strips of
queries, each with the keys that one of them may see, by torch's memory-efficient kernel (Rabe and Staats 2021,
arXiv:2112.05682).

What hides pairs is made for one strip at a time, forward and backward: QUERIES x S numbers, never S x S. What a strip
can see is known on the host (the window, the longest document), so nothing waits for the device.

Letters: B batch, S sequence, H query heads, K key heads, E and V widths; R queries and T keys of a strip.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.partial import fused_width, padded
from meshwright.kernels.row_tiles import RowTile

QUERIES = 512
"""Of a strip: few enough that hidden pairs cost little, enough to fill a GPU."""
APART = 16
"""To a multiple of which rows of added numbers are put."""
SUMS = 32
"""The same of the log-sum-exp."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *, longest: int, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """q (B, S, H, E), k (B, S, K, E), v (B, S, K, V) -> (B, S, H, V), and the log-sum-exp (B, H, S up to a multiple of
    32). `documents` (B, S), ascending along a row, of at most `longest` positions; `window` 0 = none."""
    batch, length, heads = q.shape[:3]
    out = q.new_empty(batch, length, heads, v.shape[-1])
    lse = q.new_empty(batch, heads, -(-length // SUMS) * SUMS, dtype=torch.float32)
    for tile in strips(length, longest, window):
        bias = _bias(tile, documents, window, q)
        part, sums = compat.efficient_attention(
            *_read(q, k, v, tile), bias, causal=bias is None, scale=scale
        )  # fmt: skip
        out[:, tile.queries] = part.transpose(1, 2)[..., : v.shape[-1]]
        lse[..., tile.queries.start : tile.queries.start + sums.shape[-1]] = sums
    return out, lse


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor | None, *,
    longest: int, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    of_q = q.new_empty(q.shape)
    of_k, of_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    for tile in strips(q.shape[1], longest, window):
        bias = _bias(tile, documents, window, q)
        given, made = (_wide(x[:, tile.queries]) for x in (gradient, out))
        start, count = tile.queries.start, tile.queries.stop - tile.queries.start
        sums = lse[..., start : start + -(-count // SUMS) * SUMS].contiguous()
        found = compat.efficient_attention_backward(
            given, *_read(q, k, v, tile), bias, made, sums, causal=bias is None, scale=scale
        )
        of_q[:, tile.queries] = found[0].transpose(1, 2)[..., : q.shape[-1]]
        for sums_of, part in ((of_k, found[1]), (of_v, found[2])):
            own = part.transpose(1, 2)[..., : sums_of.shape[-1]]
            sums_of[:, tile.keys] += own.unflatten(2, (sums_of.shape[2], -1)).sum(3)
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def strips(length: int, longest: int, window: int) -> Iterator[RowTile]:
    """Of all rows: a query sees `longest` positions at most, and those of its window."""
    reach = min(window or length, longest, length)
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        yield RowTile(slice(None), slice(start, stop), slice(max(0, start - reach + 1), stop))


def _read(q: Tensor, k: Tensor, v: Tensor, tile: RowTile) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, H, R, E), keys and values (B, H, T, .): once for each head, as the kernel takes them."""
    group = q.shape[2] // k.shape[2]
    keys, values = (x[:, tile.keys].repeat_interleave(group, dim=2) if group > 1 else x[:, tile.keys] for x in (k, v))
    return _wide(q[:, tile.queries]), _wide(keys), _wide(values)


def _wide(x: Tensor) -> Tensor:
    """(B, R, H, E) -> (B, H, R, E), of a width that the kernel reads."""
    return padded(x, fused_width(x.shape[-1])).transpose(1, 2)


def _bias(tile: RowTile, documents: Tensor | None, window: int, like: Tensor) -> Tensor | None:
    """(B, H, R, T), -inf where hidden; None where only what comes after a query is."""
    if documents is None and tile.is_causal(window):
        return None
    hidden = tile.hidden(window, like.device)[None]
    if documents is not None:
        hidden = hidden | (documents[:, tile.queries, None] != documents[:, None, tile.keys])
    size = (*hidden.shape[:2], -(-hidden.shape[2] // APART) * APART)
    bias = like.new_zeros(size)[..., : hidden.shape[2]].masked_fill_(hidden, float("-inf"))
    return bias[:, None].expand(like.shape[0], like.shape[2], -1, -1)
