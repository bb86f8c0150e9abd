"""Causal attention by blocks of queries, for CPUs on which torch's fused kernel is slow.

Each block multiplies only the keys it may see (half the work of the whole square), in products large enough for the
matrix library; query heads that share a key head are one product. Nothing of size S x T is kept: the backward pass
makes the weights of a block again. Measured on an AVX2 machine: docs/benchmarks.md.

Where a CPU multiplies 16-bit numbers, scores and weights of 16-bit queries have 16 bits too, as in plain code of that
dtype; sums over blocks are fp32. Dropout's factors would be rounded: with it, and on other CPUs, all is fp32 inside.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.row_tiles import RowTile


def _weights(q: Tensor, k: Tensor, tile: RowTile, window: int) -> Tensor:
    """Softmax weights (B K, G R, T') of the queries q (B K, G, R, E), which are scaled, of keys k (B K, T', E)."""
    scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2))
    view = scores.view(*q.shape[:3], -1)
    if window and tile.keys.start > tile.queries.stop - 1 - window:
        window = 0  # nothing is left behind
    shown = 0 if window else tile.queries.start - tile.keys.start
    hidden = tile.hidden(window, q.device)[:, shown:]
    view[..., shown:].masked_fill_(hidden, float("-inf"))
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


def _inner(q: Tensor, dropped: "Dropped | None") -> torch.dtype:
    """In which dtype scores and weights of queries are made."""
    narrow = q.dtype != torch.float32 and dropped is None and compat.cpu_multiplies(q.dtype)
    return q.dtype if narrow and q.dtype.itemsize == 2 else torch.float32


def _as_read(q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled queries (B K, G, S, E), keys (B K, S, E) and values (B K, S, V) in a dtype."""
    keys = k.shape[2]
    queries = _grouped(q.to(dtype), keys) * scale
    return queries, _grouped(k.to(dtype), keys)[:, 0], _grouped(v.to(dtype), keys)[:, 0]


def _heads(rows: slice, keys: int) -> slice:
    """Of rows (B): theirs of (B K)."""
    return slice(rows.start * keys, rows.stop * keys)


def random_state(device: torch.device) -> Tensor:
    """Of the generator of a device, as bytes on the host, which does not wait for it."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class Dropped:
    """Attention dropout: factors of the weights, 0 or 1 / (1 - rate), tile by tile. The same state of a generator gives
    the same ones, so that the backward pass draws them again and none is kept."""

    def __init__(self, rate: float, state: Tensor | None = None, device: torch.device | None = None) -> None:
        """Drawn by the device's own generator; `state`: as it drew them from there on."""
        self.rate = rate
        self.generator: torch.Generator | None = None
        if state is not None and not compat.is_fake(state):
            self.generator = torch.Generator(device or "cpu")
            self.generator.set_state(state)

    def factors(self, weights: Tensor) -> Tensor:
        """Of the next tile's weights, in their shape."""
        kept = torch.empty_like(weights).bernoulli_(1 - self.rate, generator=self.generator)
        return kept.div_(1 - self.rate)


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[RowTile], window: int, scale: float,
    dropped: Dropped | None = None,
) -> Tensor:  # fmt: skip
    """q (B, S, H, E), k (B, S, K, E), v (B, S, K, V) -> (B, S, H, V); where 16-bit inputs are widened inside the result
    is rounded once."""
    batch, keys, dtype = q.shape[0], k.shape[2], q.dtype
    q, k, v = _as_read(q, k, v, scale, _inner(q, dropped))
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    for tile in tiles:
        heads = _heads(tile.rows, keys)
        block = q[heads, :, tile.queries]
        weights = _weights(block, k[heads, tile.keys], tile, window)
        if dropped is not None:
            weights.mul_(dropped.factors(weights))
        out[heads, :, tile.queries] = torch.bmm(weights, v[heads, tile.keys]).view(*block.shape[:3], -1)
    return _ungrouped(out, batch).to(dtype)


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Iterable[RowTile], window: int, scale: float,
    dropped: Dropped | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v. `dropped` begins as that of the forward pass."""
    batch, keys, dtype = q.shape[0], k.shape[2], q.dtype
    q, k, v = _as_read(q, k, v, scale, _inner(q, dropped))
    gradients = _grouped(gradient.to(q.dtype), keys)
    of_q, of_k, of_v = torch.empty_like(q), *(torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    for tile in tiles:
        heads = _heads(tile.rows, keys)
        block, seen = q[heads, :, tile.queries], k[heads, tile.keys]
        given = gradients[heads, :, tile.queries].flatten(1, 2)
        weights = _weights(block, seen, tile, window)
        factors = dropped.factors(weights) if dropped is not None else None
        read = weights if factors is None else weights * factors
        of_v[heads, tile.keys] += torch.bmm(read.transpose(1, 2), given)
        of_scores = torch.bmm(given, v[heads, tile.keys].transpose(1, 2))
        if factors is not None:
            of_scores.mul_(factors)
        of_scores = compat.softmax_backward(of_scores, weights)
        of_q[heads, :, tile.queries] = torch.bmm(of_scores, seen).view_as(block)
        of_k[heads, tile.keys] += torch.bmm(of_scores.transpose(1, 2), block.flatten(1, 2))
    return (
        _ungrouped(of_q.mul_(scale), batch).to(dtype),
        _ungrouped(of_k.unsqueeze(1), batch).to(dtype),
        _ungrouped(of_v.unsqueeze(1), batch).to(dtype),
    )
