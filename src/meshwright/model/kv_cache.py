"""Keys and values of the past, so that one new token costs one token's work."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.kernels.attention import Mask

Norms = tuple[Tensor, Tensor, float]
"""Of queries and keys: weights (E,) of each, and what is added to mean squares."""


class Past(Protocol):
    """What one layer keeps of the past. It owns attention over itself, so that how it is kept is its own affair."""

    @property
    def low_rank(self) -> bool:
        """Whether latent attention keeps its low rank here: one head of keys for all, whose first dims are the values.
        Else it keeps the keys and values of every head."""

    @property
    def length(self) -> int:
        """Positions held."""

    def turn(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, norms: Norms | None
    ) -> bool:  # fmt: skip
        """Norm and turn q and k (B, S, heads, E) in their own memory, and keep k and v, so that `attend` need not.
        False where the caller must turn them itself. `norms`: weights (E,) of the norms of q and k, and their eps."""

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> Tensor:
        """Keeps k and v of S new positions; q (B, S, H, E) over all so far -> (B, S, H, V). `attend`: the kernel."""

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (B',) of the batch; one may be there several times."""


class LayerCache:
    """Past keys and values of one layer, in buffers that double when full. Tensors (B, T, K, E)."""

    low_rank = False

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def turn(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, norms: Norms | None
    ) -> bool:  # fmt: skip
        """As Past: never."""
        return False

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> Tensor:
        """As Past."""
        return attend(q, *self.extend(k, v), mask, scale=scale)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append S new positions; returns all keys and values so far."""
        end = self.length + keys.shape[1]
        self._keys = self._put(self._keys, keys, end)
        self._values = self._put(self._values, values, end)
        self.length = end
        return self._keys[:, :end], self._values[:, :end]

    def select(self, rows: Tensor) -> None:
        """As Past."""
        self._keys = None if self._keys is None else self._keys[rows]
        self._values = None if self._values is None else self._values[rows]

    def _put(self, buffer: Tensor | None, new: Tensor, end: int) -> Tensor:
        if buffer is None or buffer.shape[1] < end:
            grown = torch.empty(new.shape[0], max(64, 2 * end), *new.shape[2:], dtype=new.dtype, device=new.device)
            if buffer is not None:
                grown[:, : self.length] = buffer[:, : self.length]
            buffer = grown
        buffer[:, self.length : end] = new
        return buffer


class Cache:
    """The past of each layer; by default LayerCaches."""

    def __init__(self, layers: int, make: Callable[[], Past] = LayerCache) -> None:
        self.layers: Sequence[Past] = [make() for _ in range(layers)]

    @property
    def length(self) -> int:
        """Positions held."""
        return self.layers[0].length

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (B',) of the batch; one may be there several times."""
        for layer in self.layers:
            layer.select(rows)
