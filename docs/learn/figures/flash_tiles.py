"""FlashAttention's steps by `examples/flash_tiles.py`: which tile meets which, bytes so far, and the running sums."""

from typing import Any

import torch

from examples.flash_tiles import compare, tiles

TITLE = "FlashAttention, tile by tile"
TILE = DIM = 64
WIDTH = 2
COUNTS = (2, 3, 4, 5, 6, 8)
"""Tiles of the sequence."""


def record(number: int, *, causal: bool) -> dict[str, Any]:
    """All steps over so many tiles, and the bytes of both forms."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(number * TILE, DIM, generator=generator, dtype=torch.float64) for _ in range(3))
    steps, moved = [], 0
    for step in tiles(q, k, v, TILE, torch.empty_like(q), causal=causal):
        moved += WIDTH * (step.read + step.written)
        steps.append([
            step.query_tile, step.key_tile, WIDTH * step.read, WIDTH * step.written, moved,
            round(float(step.largest[-1]), 3), round(float(step.total[-1]), 3),
        ])  # fmt: skip
    counted = compare(number * TILE, DIM, TILE, WIDTH, causal=causal)
    return {"steps": steps, "plain": counted["plain_bytes"], "stored": counted["stored_bytes"]}


def data() -> dict[str, Any]:
    """Mask -> number of tiles -> its steps."""
    return {
        "tile": TILE,
        "masks": {
            name: {number: record(number, causal=causal) for number in COUNTS}
            for name, causal in (("every key", False), ("causal", True))
        },
    }
