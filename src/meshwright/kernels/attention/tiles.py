"""Tiles of attention: runs of queries with the keys that they see, for documents, stretches of a window, or blocks.

Letters: B batch, S sequence, H query heads, E width of a head.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright import compat

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
        square = min(end, begin + (window or end))
        yield RowTile(rows, slice(begin, square), slice(begin, square))
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
