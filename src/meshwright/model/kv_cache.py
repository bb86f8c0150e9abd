"""Keys and values of past tokens, so a new token costs one token's work."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.kernels.attention.attend import Mask

Norms = tuple[Tensor, Tensor, float]
"""Norms of queries and keys: the weights (E,) of each, and the epsilon."""


class Past(Protocol):
    """Past of one layer. It runs attention over itself, so its memory format is private."""

    @property
    def low_rank(self) -> bool:
        """True if latent attention stores its low rank here, as one key head that all query heads share."""

    @property
    def length(self) -> int:
        """Number of positions stored."""

    def turn(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, norms: Norms | None
    ) -> bool:  # fmt: skip
        """Norm and rotate q and k (B, S, heads, E) in place, and store k and v ahead of `attend`.

        Returns False if the caller must do so itself. `norms`: weights (E,) of the norms of q and k, and their epsilon.
        """

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> Tensor:
        """Store k and v of S new positions and attend with q (B, S, H, E) over all so far. Returns (B, S, H, V)."""

    def select(self, rows: Tensor) -> None:
        """Continue with these rows (B',) of the batch. A row may repeat."""


class LayerCache:
    """Past keys and values of one layer, (B, T, K, E), in buffers that double when full."""

    low_rank = False

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def turn(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, norms: Norms | None
    ) -> bool:  # fmt: skip
        """Return False: the caller rotates."""
        return False

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> Tensor:
        """Store k and v and call the kernel `attend` over all positions."""
        return attend(q, *self.extend(k, v), mask, scale=scale)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append S new positions and return all keys and values so far."""
        end = self.length + keys.shape[1]
        self._keys = self._put(self._keys, keys, end)
        self._values = self._put(self._values, values, end)
        self.length = end
        return self._keys[:, :end], self._values[:, :end]

    def select(self, rows: Tensor) -> None:
        """Continue with these rows (B',) of the batch. A row may repeat."""
        self._keys = None if self._keys is None else self._keys[rows]
        self._values = None if self._values is None else self._values[rows]

    def _put(self, buffer: Tensor | None, new: Tensor, end: int) -> Tensor:
        if buffer is None or buffer.shape[1] < end:
            # Doubling makes the copies of all growth together cost no more than one copy of the end.
            grown = torch.empty(new.shape[0], max(64, 2 * end), *new.shape[2:], dtype=new.dtype, device=new.device)
            if buffer is not None:
                grown[:, : self.length] = buffer[:, : self.length]
            buffer = grown
        buffer[:, self.length : end] = new
        return buffer


class Cache:
    """Past of every layer, by default as LayerCache."""

    def __init__(self, layers: int, make: Callable[[], Past] = LayerCache) -> None:
        self.layers: Sequence[Past] = [make() for _ in range(layers)]

    @property
    def length(self) -> int:
        """Number of positions stored."""
        return self.layers[0].length

    def select(self, rows: Tensor) -> None:
        """Continue with these rows (B',) of the batch. A row may repeat."""
        for layer in self.layers:
            layer.select(rows)
