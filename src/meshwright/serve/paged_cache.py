"""Where keys and values of all sequences are kept: blocks of positions, one store for each layer.

Latent attention keeps its low rank alone: a vector and a rotary key that all heads share, once, for keys and values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meshwright.kernels.attention import Mask
from meshwright.kernels.paged_attention import PagedCall, attend_paged
from meshwright.model.attention import LatentAttention
from meshwright.model.kv_cache import Cache
from meshwright.model.transformer import Block, Transformer


@dataclass(slots=True)
class StepPlaces:
    """Where the rows of a step are kept and what they see."""

    slots: Tensor
    """(N,) block * size + position within, of each row."""
    calls: dict[int, Sequence[PagedCall]]
    """By window."""


@final
class PagedLayer:
    """The store of one layer. As Past, for packed rows of many sequences (B = 1)."""

    length = 0
    """Positions are given with each step."""

    def __init__(self, block: Block, number: int, size: int, like: Tensor) -> None:
        """Room for `number` blocks of `size` positions, all zero, in the dtype of `like`."""
        attention, shape = block.attention, block.attention.shape
        self.window = block.window
        self.low_rank = isinstance(attention, LatentAttention) and attention.folds_keys
        heads, width = shape.kv_heads, shape.head_dim
        values = shape.mla.v_dim if shape.mla else width
        if self.low_rank:
            assert shape.mla is not None
            heads, width, values = 1, shape.mla.kv_rank + shape.mla.rope_dim, 0
        room = (number, size, heads)
        self.keys = like.new_zeros(*room, width)
        self.values = like.new_zeros(*room, values) if values else self.keys
        self.places: StepPlaces | None = None

    @property
    def bytes(self) -> int:
        """Of its blocks."""
        return self.keys.nbytes + (0 if self.low_rank else self.values.nbytes)

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> Tensor:
        """As Past. Who sees whom stands in the step's calls, not in the mask."""
        assert self.places is not None
        q, k, v = q[0], k[0], v[0]
        self.keys.flatten(0, 1).index_copy_(0, self.places.slots, k)
        if not self.low_rank:
            self.values.flatten(0, 1).index_copy_(0, self.places.slots, v)
        calls = self.places.calls[self.window]
        return attend_paged(q, k, v, self.keys, self.values, calls, scale=scale).unsqueeze(0)

    def copy(self, old: Tensor, new: Tensor) -> None:
        """Blocks (C,) to other blocks (C,)."""
        for kept in (self.keys,) if self.low_rank else (self.keys, self.values):
            kept[new] = kept[old]

    def clear(self, blocks: Tensor) -> None:
        """Blocks (C,) become zero."""
        self.keys[blocks] = 0
        self.values[blocks] = 0

    def select(self, rows: Tensor) -> None:
        """Sequences leave and come by their tables."""
        raise TypeError("a paged cache is not selected from: rows of a step name their blocks")


@final
class PagedCache:
    """The stores of a model's layers, and two blocks behind the last one: one that stays zero, which pads tables, and
    one that nobody reads, into which rows without a sequence are written."""

    def __init__(self, model: Transformer, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.zero, self.unread = number, number + 1
        self.layers = [PagedLayer(block, number + 2, size, model.embed.weight) for block in model.blocks]
        self.windows = sorted({layer.window for layer in self.layers})
        self.device = self.layers[0].keys.device

    @property
    def widest(self) -> int:
        """Positions behind which no layer looks; 0 = some layer looks at all."""
        return 0 if 0 in self.windows else max(self.windows)

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(layer.bytes for layer in self.layers)

    def at(self, places: StepPlaces) -> Cache:
        """The cache for a forward pass over rows with these places."""
        for layer in self.layers:
            layer.places = places
        return Cache(len(self.layers), iter(self.layers).__next__)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks to other blocks: (from, to)."""
        if pairs:
            old, new = torch.tensor(pairs, device=self.device).t()
            for layer in self.layers:
                layer.copy(old, new)

    def clear(self, blocks: Sequence[int]) -> None:
        """What they held was no numbers: else it would spoil who gets them next."""
        for layer in self.layers:
            layer.clear(torch.tensor(blocks, device=self.device))


def bytes_per_block(model: Transformer, size: int) -> int:
    """Of keys and values of `size` positions in all layers."""
    return PagedCache(model, 1, size).bytes // 3
