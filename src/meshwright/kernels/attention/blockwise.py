"""Causal attention by blocks of queries, for CPUs on which torch's fused kernel is slow.

Each block multiplies only the keys that it may see (half of the whole square), in products large enough for the matrix
library. Query heads that share a key head form one product. Nothing of size S x T is saved: the backward pass
recomputes the weights of a block. Measured on an AVX2 machine: docs/benchmarks.md.

Where a CPU multiplies 16-bit numbers, scores and weights of 16-bit queries have 16 bits too, as in plain code of that
dtype, and sums over blocks are fp32. With dropout, and on other CPUs, all inner arithmetic is fp32.

A tile is a run of queries with the keys that they see, for documents, stretches of a window, or blocks.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.norm.dropout import AttentionDropout, features, keep_mask

STRETCH = 64
"""Least queries of a window's stretch: a shorter one multiplies fewer hidden keys, in more calls."""
BLOCK, BLOCK_OF_16_BITS = 64, 128
"""Queries of a block, in fp32 and in 16 bits.

64 x T weights of a few heads stay in the second-level cache, and twice as many of 16 bits. In 16 bits fewer distinct
sizes also save memory: oneDNN caches code for each.
"""
AT_ONCE = 2**20
"""Most 16-bit weights of a block, over all its rows and heads. More are computed row by row."""


class RowTile(NamedTuple):
    """Queries of some rows and the keys that any of them sees. The last key is that of the last query."""

    rows: slice
    queries: slice
    keys: slice

    def is_causal(self, window: int) -> bool:
        """Return whether queries and keys are the same, and only later positions are hidden."""
        return self.queries == self.keys and (not window or self.queries.stop - self.queries.start <= window)

    def hidden(self, window: int, device: torch.device) -> Tensor:
        """Return hidden pairs (queries, keys) bool: later keys, and those before the window (0 = none)."""
        query = torch.arange(self.queries.start, self.queries.stop, device=device)[:, None]
        key = torch.arange(self.keys.start, self.keys.stop, device=device)
        after = key > query
        return after | (key <= query - window) if window else after


def block_of(q: Tensor) -> int:
    """Return the queries of a block."""
    return BLOCK_OF_16_BITS if q.dtype.itemsize == 2 and compat.cpu_multiplies(q.dtype) else BLOCK


def rows_of(documents: Tensor | None, q: Tensor) -> list[tuple[slice, int, int]]:
    """List (rows, first position, position after the last) of each document.

    Rows of one document each are one entry. So are all rows of a dry run, whose tensors have no values: no other case
    takes more memory.
    """
    count, length = q.shape[:2]
    changes = None if documents is None or compat.is_fake(documents) else documents.diff(dim=1)
    if changes is None or not bool(changes.any()):
        return [(slice(0, count), 0, length)]
    spans = []
    for row in range(count):
        borders = [0, *(changes[row].nonzero().flatten() + 1).tolist(), length]
        spans += [(slice(row, row + 1), *pair) for pair in pairwise(borders)]
    return spans


def stretches(documents: list[tuple[slice, int, int]], window: int) -> Iterator[RowTile]:
    """Yield whole documents, or stretches of what a window sees of them."""
    for rows, begin, end in documents:
        # The first queries see everything before them: one causal square, without a mask.
        square = min(end, begin + (window or end))
        yield RowTile(rows, slice(begin, square), slice(begin, square))
        # With a quarter of the window, a stretch multiplies a quarter more pairs than its queries see.
        step = max(STRETCH, window // 4)
        for start in range(square, end, step):
            stop = min(start + step, end)
            yield RowTile(rows, slice(start, stop), slice(max(begin, start - window + 1), stop))


def blocks(documents: list[tuple[slice, int, int]], window: int, q: Tensor) -> Iterator[RowTile]:
    """Yield blocks of queries q (B, S, H, E), of as many rows as fit together."""
    size = block_of(q)
    for rows, begin, end in documents:
        seen = min(end - begin, window + size) if window else end - begin
        weights = q.shape[2] * size * seen
        together = max(1, AT_ONCE // weights) if size > BLOCK else rows.stop - rows.start
        for row in range(rows.start, rows.stop, together):
            block_rows = slice(row, min(row + together, rows.stop))
            for start in range(begin, end, size):
                stop = min(start + size, end)
                first = max(begin, start - window + 1) if window else begin
                yield RowTile(block_rows, slice(start, stop), slice(first, stop))


def _weights(q: Tensor, k: Tensor, tile: RowTile, window: int) -> Tensor:
    """Return softmax weights (B K, G R, T') of scaled queries q (B K, G, R, E) over keys k (B K, T', E)."""
    scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2))
    view = scores.view(*q.shape[:3], -1)
    if window and tile.keys.start > tile.queries.stop - 1 - window:
        # Every query sees all keys of the tile that come before it.
        window = 0
    # Without a window all keys before the block are seen, so only its own square needs the mask.
    shown = 0 if window else tile.queries.start - tile.keys.start
    hidden = tile.hidden(window, q.device)[:, shown:]
    view[..., shown:].masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1)


def _grouped(x: Tensor, keys: int) -> Tensor:
    """Group heads by key head: (B, S, H, E) -> (B K, G, S, E) with H = K G, contiguous."""
    batch, length, heads, width = x.shape
    split = x.view(batch, length, keys, heads // keys, width) if x.is_contiguous() else x.unflatten(2, (keys, -1))
    return split.permute(0, 2, 3, 1, 4).reshape(batch * keys, heads // keys, length, width)


def _ungrouped(x: Tensor, batch: int) -> Tensor:
    """Undo `_grouped`: (B K, G, S, E) -> (B, S, H, E)."""
    out: Tensor = x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out


class _Masks:
    """Masks of dropout for tiles of weights (b K, G R, T')."""

    def __init__(self, dropout: AttentionDropout, keys: int) -> None:
        self.rate = dropout.rate
        self.rows = _grouped(dropout.rows.unsqueeze(-1), keys).squeeze(-1)
        self.columns = features(0, self.rows.shape[-1], self.rows.device)

    def of_tile(self, tile: RowTile, heads: slice) -> Tensor:
        """Return which weights stay, bool."""
        return keep_mask(self.rows[heads, :, tile.queries].flatten(1), self.columns[tile.keys], self.rate)


def _inner_dtype(q: Tensor, dropout: AttentionDropout | None) -> torch.dtype:
    narrow = q.dtype != torch.float32 and dropout is None and compat.cpu_multiplies(q.dtype)
    return q.dtype if narrow and q.dtype.itemsize == 2 else torch.float32


def _grouped_inputs(q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled queries (B K, G, S, E), keys (B K, S, E) and values (B K, S, V) in a dtype."""
    keys = k.shape[2]
    # Scaling queries is S x E products, scaling their scores would be S x S.
    queries = _grouped(q.to(dtype), keys) * scale
    return queries, _grouped(k.to(dtype), keys)[:, 0], _grouped(v.to(dtype), keys)[:, 0]


def _heads(rows: slice, keys: int) -> slice:
    """Map rows of (B) to those of (B K)."""
    return slice(rows.start * keys, rows.stop * keys)


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[RowTile], window: int, scale: float,
    dropout: AttentionDropout | None = None,
) -> Tensor:  # fmt: skip
    """Attend q (B, S, H, E) over k (B, S, K, E) and v (B, S, K, V). Returns (B, S, H, V).

    Where 16-bit inputs are widened inside, the result is rounded once.
    """
    batch, keys, dtype = q.shape[0], k.shape[2], q.dtype
    q, k, v = _grouped_inputs(q, k, v, scale, _inner_dtype(q, dropout))
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    masks = None if dropout is None else _Masks(dropout, keys)
    for tile in tiles:
        heads = _heads(tile.rows, keys)
        block = q[heads, :, tile.queries]
        weights = _weights(block, k[heads, tile.keys], tile, window)
        if masks is not None:
            weights.mul_(masks.of_tile(tile, heads))
        out[heads, :, tile.queries] = torch.bmm(weights, v[heads, tile.keys]).view(*block.shape[:3], -1)
    if dropout is not None:
        out.mul_(dropout.growth)
    return _ungrouped(out, batch).to(dtype)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[RowTile], window: int, scale: float,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    batch, keys, dtype = q.shape[0], k.shape[2], q.dtype
    q, k, v = _grouped_inputs(q, k, v, scale, _inner_dtype(q, dropout))
    gradients = _grouped(gradient.to(q.dtype), keys)
    masks = None if dropout is None else _Masks(dropout, keys)
    if dropout is not None:
        gradients = gradients * dropout.growth
    # A query is in one tile, so its gradient is written once. Keys are in many: their sums are fp32.
    q_gradient, k_gradient, v_gradient = (
        torch.empty_like(q),
        *(torch.zeros_like(x, dtype=torch.float32) for x in (k, v)),
    )
    for tile in tiles:
        heads = _heads(tile.rows, keys)
        block, seen_keys = q[heads, :, tile.queries], k[heads, tile.keys]
        incoming = gradients[heads, :, tile.queries].flatten(1, 2)
        weights = _weights(block, seen_keys, tile, window)
        mask = masks.of_tile(tile, heads) if masks is not None else None
        dropped_weights = weights if mask is None else weights * mask
        v_gradient[heads, tile.keys] += torch.bmm(dropped_weights.transpose(1, 2), incoming)
        score_gradient = torch.bmm(incoming, v[heads, tile.keys].transpose(1, 2))
        if mask is not None:
            score_gradient.mul_(mask)
        score_gradient = compat.softmax_backward(score_gradient, weights)
        q_gradient[heads, :, tile.queries] = torch.bmm(score_gradient, seen_keys).view_as(block)
        k_gradient[heads, tile.keys] += torch.bmm(score_gradient.transpose(1, 2), block.flatten(1, 2))
    # Queries were scaled before the products, so the gradient of keys has the factor already.
    return (
        _ungrouped(q_gradient.mul_(scale), batch).to(dtype),
        _ungrouped(k_gradient.unsqueeze(1), batch).to(dtype),
        _ungrouped(v_gradient.unsqueeze(1), batch).to(dtype),
    )
