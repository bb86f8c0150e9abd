"""FlashAttention's tiles step by step, with every byte counted: the S x S weights are never written.

    python examples/flash_tiles.py
    python examples/flash_tiles.py --sequence 8192 --dim 128 --tile 128 --causal --json

One head. A tile of queries stays in the fast memory of a processor, and tiles of keys and values pass by. Of each query
only three things are kept: the largest score so far, the sum of the exponentials, and the sum of values weighted by
them (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867; tiles: Dao et al. 2022, arXiv:2205.14135).
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One tile of queries meets one tile of keys."""

    query_tile: int
    key_tile: int
    read: int
    """Elements read from the large memory in this step."""
    written: int
    """Elements written to it."""
    largest: Tensor
    """Largest score of each query so far."""
    total: Tensor
    """Sum of exp(score - largest) so far."""


def tiles(q: Tensor, k: Tensor, v: Tensor, tile: int, out: Tensor, *, causal: bool) -> Iterator[Step]:
    """Attend q (S, E) over k and v (S, E), fill `out`, and yield every step. Tiles that see nothing are skipped."""
    scale = q.shape[1] ** -0.5
    for first in range(0, len(q), tile):
        queries = q[first : first + tile]
        largest = torch.full((len(queries), 1), -inf, dtype=q.dtype)
        total = torch.zeros(len(queries), 1, dtype=q.dtype)
        weighted = torch.zeros_like(queries)
        last = min(len(k), first + len(queries)) if causal else len(k)
        for start in range(0, last, tile):
            keys, values = k[start : start + tile], v[start : start + tile]
            scores = queries @ keys.T * scale  # this tile of S exists here alone
            if causal:
                hidden = torch.arange(start, start + len(keys)) > torch.arange(first, first + len(queries))[:, None]
                scores = scores.masked_fill(hidden, -inf)
            higher = torch.maximum(largest, scores.amax(1, keepdim=True))
            correction = torch.exp(largest - higher)  # what was summed relative to a smaller maximum
            weights = torch.exp(scores - higher)
            total = total * correction + weights.sum(1, keepdim=True)
            weighted = weighted * correction + weights @ values
            largest = higher
            is_last = start + tile >= last
            if is_last:
                out[first : first + tile] = weighted / total
            read = keys.numel() + values.numel() + (queries.numel() if start == 0 else 0)
            yield Step(first // tile, start // tile, read, queries.numel() if is_last else 0, largest, total)


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, dict[str, tuple[int, int]]]:
    """Attend in three kernels, and count (elements read, elements written) of each."""
    scores = q @ k.T * q.shape[1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -inf)
    weights = scores.softmax(1)
    out = weights @ v
    moved = {
        "S = Q K^T": (q.numel() + k.numel(), scores.numel()),
        "P = softmax(S)": (scores.numel(), weights.numel()),
        "O = P V": (weights.numel() + v.numel(), out.numel()),
    }
    return out, moved


def compare(sequence: int, dim: int, tile: int, width: int, *, causal: bool) -> dict[str, Any]:
    """Run both forms on random numbers, and count their bytes. `width`: bytes of an element."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sequence, dim, generator=generator, dtype=torch.float64) for _ in range(3))
    expected, moved = plain(q, k, v, causal=causal)
    out = torch.empty_like(q)
    steps = list(tiles(q, k, v, tile, out, causal=causal))
    return {
        "sequence": sequence, "dim": dim, "tile": tile, "width": width, "causal": causal,
        "plain": {name: [width * read, width * written] for name, (read, written) in moved.items()},
        "plain_bytes": width * sum(read + written for read, written in moved.values()),
        "tiled_bytes": width * sum(step.read + step.written for step in steps),
        # Keys and values of one head fit the L2 cache, so the large memory sees each of them once.
        "cached_bytes": width * 4 * sequence * dim,
        "stored_bytes": width * sequence**2,
        "steps": len(steps), "most_steps": ceil(sequence / tile) ** 2,
        "difference": float((out - expected).abs().max()),
    }  # fmt: skip


def main() -> None:
    """Print both forms."""
    reader = argparse.ArgumentParser(description="FlashAttention's tiles, with bytes counted.")
    reader.add_argument("--sequence", type=int, default=2048, help="positions (2048)")
    reader.add_argument("--dim", type=int, default=128, help="width of the head (128)")
    reader.add_argument("--tile", type=int, default=128, help="positions of a tile (128)")
    reader.add_argument("--width", type=int, default=2, choices=(2, 4), help="bytes of an element (2)")
    reader.add_argument("--causal", action="store_true", help="a query sees no later key")
    reader.add_argument("--json", action="store_true", help="print one JSON document")
    options = reader.parse_args()
    if min(options.sequence, options.dim, options.tile) < 1 or options.sequence > 16384:
        reader.error("sequence, dim and tile must be at least 1, and sequence at most 16384")
    counted = compare(options.sequence, options.dim, options.tile, options.width, causal=options.causal)
    if options.json:
        print(json.dumps(counted))
        return
    mask = "causal" if options.causal else "no mask"
    print(f"one head, {options.sequence:,} x {options.dim}, {options.width} bytes per element, {mask}")
    print(f"{'kernel':<34}{'read':>12}{'written':>12}  MB")
    for name, (read, written) in counted["plain"].items():
        print(f"{name:<34}{read / 1e6:>12.2f}{written / 1e6:>12.2f}")
    print(f"{'plain, all three':<34}{counted['plain_bytes'] / 1e6:>24.2f}")
    print(f"{'tiles of ' + str(options.tile) + ', into fast memory':<34}{counted['tiled_bytes'] / 1e6:>24.2f}")
    print(f"{'tiles, keys and values in L2':<34}{counted['cached_bytes'] / 1e6:>24.2f}")
    same = (
        "both answers agree" if counted["difference"] < 1e-9 else f"the answers differ by {counted['difference']:.1e}"
    )
    print(f"S in memory: {counted['stored_bytes'] / 1e6:.2f} MB against 0; {counted['steps']} of "
          f"{counted['most_steps']} tiles computed; {same}")  # fmt: skip


if __name__ == "__main__":
    main()
