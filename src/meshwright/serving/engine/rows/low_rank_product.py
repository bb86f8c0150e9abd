"""The product of rows with a low-rank matrix, (x A^T) (s B)^T, which an adapter of requests adds for its rows."""

from ctypes import Structure, addressof
from typing import final

import torch
from torch import Tensor

from meshwright.kernels.c import serving_library
from meshwright.kernels.c.declarations import structure
from meshwright.kernels.c.panels import LANES, Panels
from meshwright.kernels.c.serving_library import Loops
from meshwright.kernels.linear.linear import product_dtype
from meshwright.serving.engine.rows.exact_rows import ORDERS, TILE

Rows = slice | Tensor
"""Rows of a pass: a slice, or their numbers."""


@final
class LowRankProduct:
    """rows (R, in) -> (R, out): times A, then times s B."""

    def __init__(self, a: Tensor, b: Tensor, *, exact: bool) -> None:
        """Take `a` (rank, in) and `b` (out, rank) with s. `exact`: a row's bits do not depend on the number of rows."""
        self._dtype, inner = a.dtype, product_dtype(a)
        a, b = a.to(inner), b.to(inner)
        self._a, self._b = a.t().contiguous(), b.t().contiguous()
        self._panels = _panels(a, b) if serving_library.takes(a, b) else None
        self._addresses = None if self._panels is None else [addressof(panels.fields) for panels in self._panels]
        self._tile = self._checked_tile() if exact else 0

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply by A, then by s B."""
        return self._multiply(rows.to(self._a.dtype)).to(rows.dtype)

    def _multiply(self, rows: Tensor) -> Tensor:
        loops = serving_library.loops()
        if loops is not None and self._panels is not None and loops.few(len(rows)) and serving_library.takes(rows):
            return loops.multiply(loops.multiply(rows, self._panels[0]), self._panels[1])
        if not self._tile:
            return self._plain(rows)
        room = -(-len(rows) // self._tile) * self._tile
        padded = rows.new_zeros(room, rows.shape[1])
        padded[: len(rows)] = rows
        tiles = (tile.clone() for tile in padded.split(self._tile))  # equal alignment: each starts an allocation
        return torch.cat([self._plain(tile) for tile in tiles])[: len(rows)]

    def fields(self, rows: Rows, column: int, loops: Loops) -> Structure | None:
        """Return the struct LowRank with which a fused block adds this product for rows of a step, from a `column` on.

        None = loops cannot compute it.
        """
        if self._addresses is None:
            return None
        a, b = self._addresses
        if isinstance(rows, slice):
            begin, count, numbers = rows.start, rows.stop - rows.start, None
        else:
            begin, count, numbers = 0, len(rows), rows.data_ptr()
        if not loops.few(count):
            return None
        return structure("LowRank")(a=a, b=b, rows=numbers, begin=begin, count=count, column=column)

    @property
    def bytes(self) -> int:
        """Memory of its matrices, in every stored order."""
        return self._a.nbytes + self._b.nbytes + sum(panels.bytes for panels in self._panels or ())

    @property
    def a(self) -> Tensor:
        """(rank, in)."""
        return self._a.t().to(self._dtype)

    def widened(self, narrow: Tensor) -> Tensor:
        """Return rows times A (R, rank) -> (R, out)."""
        return torch.mm(narrow.to(self._b.dtype), self._b).to(narrow.dtype)

    def _plain(self, rows: Tensor) -> Tensor:
        return torch.mm(torch.mm(rows, self._a), self._b)

    def _checked_tile(self) -> int:
        """Return TILE if the order of that many rows does not matter, else 1."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(TILE, len(self._a), generator=generator).to(self._a)
        right = self._plain(rows)
        orders = (torch.randint(TILE, (TILE,), generator=generator) for _ in range(ORDERS))
        return TILE if all(torch.equal(self._plain(rows[order]), right[order]) for order in orders) else 1


def _panels(a: Tensor, b: Tensor) -> tuple[Panels, Panels] | None:
    """Return both matrices for compiled loops, with the rank padded by zeros. None = loops do not take them."""
    missing = -len(a) % LANES
    wide = torch.cat((a, a.new_zeros(missing, a.shape[1])))
    narrow = torch.cat((b, b.new_zeros(len(b), missing)), dim=1)
    panels = Panels.of_numbers(wide), Panels.of_numbers(narrow)
    return None if panels[0] is None or panels[1] is None else (panels[0], panels[1])
