"""Where keys and values of all sequences are kept: blocks of positions, one store for each layer.

Latent attention keeps its low rank alone: a vector and a rotary key that all heads share, once, for keys and values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meshwright.kernels.attention import Mask
from meshwright.kernels.chooser import uses_triton
from meshwright.kernels.compiled.library import Loops, takes
from meshwright.kernels.kept_numbers import PagedStore, turn_and_keep
from meshwright.kernels.paged_attention import (
    DenseCall,
    PagedCall,
    RowsCall,
    attend_dense,
    attend_paged,
    attend_rows,
    prompt_kernel,
    row_kernel,
)
from meshwright.model.attention import LatentAttention
from meshwright.model.kv_cache import Cache, Norms
from meshwright.model.transformer import Block, Transformer
from meshwright.serve.host_copies import HostCopies, grouped, to_device
from meshwright.serve.host_tier import Move
from meshwright.spec.serving_defaults import CacheForm


@dataclass(frozen=True, slots=True)
class CopyStep:
    """What a step does with a dense copy (dense_copies.py) in each layer that sees everything."""

    keys: int
    """T of its rows."""
    room: int
    """Rows that it has memory for; 0 = it is given up."""
    rows: int
    """Rows that are attended to."""
    queries: int
    """How many rows of the step, behind those of the copies before, read it."""
    gathered: tuple[Tensor, Tensor] | None
    """(L,) rows that are filled from blocks (L, T / size) first."""
    added: tuple[Tensor, Tensor]
    """(queries,) rows and positions at which the step's keys and values are added."""
    call: DenseCall


@dataclass(slots=True)
class StepPlaces:
    """Where the rows of a step are kept and what they see."""

    slots: Tensor
    """(N,) block * size + position within, of each row."""
    copies: Sequence[CopyStep]
    """Of layers without a window; their queries are the first rows."""
    calls: Mapping[int, Sequence[PagedCall]]
    """By window; of layers without one, the rows behind those of the copies."""
    rows: RowsCall | None = None
    """The first rows, where compiled loops attend: there are no copies then, and calls are of the rows behind them."""


@final
class PagedLayer:
    """The store of one layer. As Past, for packed rows of many sequences (B = 1)."""

    length = 0
    """Positions are given with each step."""

    def __init__(
        self, block: Block, number: int, size: int, like: Tensor, loops: Loops | None, form: CacheForm
    ) -> None:  # fmt: skip
        """Room for `number` blocks of `size` positions, all zero, of numbers in the dtype of `like`."""
        self.loops = loops
        attention, shape = block.attention, block.attention.shape
        self.window = block.window
        self.low_rank = isinstance(attention, LatentAttention) and attention.folds_keys
        heads, width = attention.held_key_heads, shape.head_dim
        values = shape.mla.v_dim if shape.mla else width
        if self.low_rank:
            assert shape.mla is not None
            heads, width, values = 1, shape.mla.kv_rank + shape.mla.rope_dim, 0
        self.keys = PagedStore((number, size, heads, width), like, form)
        self.values = PagedStore((number, size, heads, values), like, form) if values else self.keys
        self.places: StepPlaces | None = None
        self.turns = False
        """Whether `turn` has a kernel here."""
        self._keeps = False  # what `turn` of this pass has kept already
        self._copies: dict[int, list[Tensor]] = {}  # by T: keys and values (room, T, K, width)

    @property
    def bytes(self) -> int:
        """Of its blocks."""
        return sum(store.bytes for store in self._stores)

    def turn(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, norms: Norms | None
    ) -> bool:  # fmt: skip
        """As Past: on a GPU, in one kernel."""
        if not self.turns:
            return False
        assert self.places is not None
        given = q[0], k[0], v[0], cos.flatten(0, 2), sin.flatten(0, 2), self.places.slots
        self._keeps = turn_and_keep(*given, self.keys, self.values, interleaved=interleaved, norms=norms)
        return self._keeps

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> Tensor:
        """As Past. Who sees whom stands in the step's calls, not in the mask."""
        assert self.places is not None
        q, k, v = q[0], k[0], v[0]
        news = (k,) if self.low_rank else (k, v)
        for store, new in zip(self._stores, news, strict=True) if not self._keeps else ():
            store.write(self.places.slots, new, self.loops)
        self._keeps = False
        done, parts = 0, list[Tensor]()
        if self.places.rows is not None:
            done, stores = len(self.places.rows.last), (self.keys, self.values)
            found = attend_rows(
                self.loops, q[:done], *stores, self.places.rows, width=v.shape[-1], window=self.window, scale=scale
            )
            parts.append(found)
        for step in () if self.window else self.places.copies:
            rows = slice(done, done + step.queries)
            copied = self._copied(step, [new[rows] for new in news])
            if copied:
                given = (copied[0][: step.rows], copied[-1][: step.rows], step.call)
                parts.append(attend_dense(q[rows], *given, scale=scale, width=v.shape[-1]))
            done = rows.stop
        if done < len(q):
            calls = self.places.calls[self.window]
            parts.append(attend_paged(q[done:], k[done:], v[done:], self.keys, self.values, calls, scale=scale))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    @property
    def kept(self) -> list[Tensor]:
        """All that it keeps, by blocks."""
        return [tensor for store in self._stores for tensor in store.tensors]

    @property
    def _stores(self) -> list[PagedStore]:
        return [self.keys] if self.low_rank else [self.keys, self.values]

    def _copied(self, step: CopyStep, news: Sequence[Tensor]) -> list[Tensor]:
        """Keys and values (room, T, K, width) of a copy with those of the step, (queries, K, width) each."""
        if not step.room:
            self._copies.pop(step.keys, None)
            return []
        kept = self._copies.get(step.keys)
        if kept is None or len(kept[0]) < step.room:
            kept = [
                _grown(None if kept is None else kept[place], store, step) for place, store in enumerate(self._stores)
            ]
            self._copies[step.keys] = kept
        for copy, store, new in zip(kept, self._stores, news, strict=True):
            if step.gathered is not None:
                rows, blocks = step.gathered
                copy[rows] = store.read(blocks.flatten()).view(len(rows), step.keys, *store.sizes[2:])
            copy[step.added] = new
        return kept

    def copy(self, old: Tensor, new: Tensor) -> None:
        """Blocks (C,) to other blocks (C,)."""
        for kept in self.kept:
            kept[new] = kept[old]

    def clear(self, blocks: Tensor) -> None:
        """Blocks (C,) become zero."""
        for kept in self.kept:
            kept[blocks] = 0

    def select(self, rows: Tensor) -> None:
        """Sequences leave and come by their tables."""
        raise TypeError("a paged cache is not selected from: rows of a step name their blocks")


def _grown(old: Tensor | None, store: PagedStore, step: CopyStep) -> Tensor:
    """A copy with more room; rows are zero until they are filled."""
    found = store.codes.new_zeros(step.room, step.keys, *store.sizes[2:], dtype=store.dtype)
    if old is not None:
        found[: len(old)] = old
    return found


@final
class PagedCache:
    """The stores of a model's layers, and two blocks behind the last one: one that stays zero, which pads tables, and
    one that nobody reads, into which rows without a sequence are written."""

    def __init__(
        self, model: Transformer, number: int, size: int, *, form: CacheForm = "model", loops: Loops | None = None,
        slots: int = 0,
    ) -> None:  # fmt: skip
        """`loops`: what attends, where the model is in fp32 on a CPU; None = torch. `slots`: blocks whose content host
        memory has room for."""
        self.form: CacheForm = form
        weight = model.embed.weight
        self.loops = loops if takes(weight) else None
        self.number, self.size = number, size
        self.zero, self.unread = number, number + 1
        self.layers = [PagedLayer(block, number + 2, size, weight, self.loops, form) for block in model.blocks]
        widest = max(layer.keys.sizes[3] for layer in self.layers)
        self.by_rows, self.attention = (
            row_kernel(weight, widest, model.kernels.prefer) if self.loops is None else (True, "compiled loops")
        )
        """Whether rows that decode read blocks where they lie; what attends for them and for prompts, and why."""
        first, shape = self.layers[0], model.shape
        group = 1 if shape.mla else shape.heads // shape.kv_heads
        prompts = prompt_kernel(weight, first.keys.sizes[3], first.values.sizes[3], group)
        self.attention += f"; of prompts: {prompts}" if prompts else ""
        for layer in self.layers:
            layer.turns = not layer.low_rank and uses_triton("turn_and_keep", weight, prefer=model.kernels.prefer)
        self.windows = sorted({layer.window for layer in self.layers})
        self.device = weight.device
        kept = [tensor for layer in self.layers for tensor in layer.kept]
        self.host = HostCopies(kept, slots) if slots else None

    @property
    def widest(self) -> int:
        """Positions behind which no layer looks; 0 = some layer looks at all."""
        return 0 if 0 in self.windows else max(self.windows)

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def copied_bytes(self) -> int:
        """Of a position in the layers that have dense copies: those without a window."""
        positions = (self.number + 2) * self.size
        return sum(layer.bytes for layer in self.layers if not layer.window) // positions

    def at(self, places: StepPlaces) -> Cache:
        """The cache for a forward pass over rows with these places."""
        for layer in self.layers:
            layer.places = places
        return Cache(len(self.layers), iter(self.layers).__next__)

    def carry_out(self, moves: Sequence[Move]) -> None:
        """What is to be moved, in order."""
        for some in grouped(moves):
            kind, source, target = some[0]
            if kind == "copy":
                old, new = to_device([move[1:] for move in some], self.device).t()
                for layer in self.layers:
                    layer.copy(old, new)
            else:
                assert self.host is not None
                (self.host.save if kind == "save" else self.host.load)(source, target)

    def clear(self, blocks: Sequence[int]) -> None:
        """What they held was no numbers: else it would spoil who gets them next."""
        for layer in self.layers:
            layer.clear(torch.tensor(blocks, device=self.device))


def bytes_per_block(model: Transformer, size: int, form: CacheForm = "model") -> int:
    """Of keys and values of `size` positions in all layers."""
    return PagedCache(model, 1, size, form=form).bytes // 3
