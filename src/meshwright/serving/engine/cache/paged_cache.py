"""Storage of the keys and values of all sequences: blocks of positions, with a store per layer.

Latent attention stores its low rank alone: a vector, and a rotary key that all heads share, once for keys and values.

Copies between host and device go without a wait: numbers of a step, its tokens, blocks of the host tier. A GPU copies
during the host's work only from and to pinned memory. With other memory torch waits for the copy, and so for all work
before it.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from meshwright.kernels.attention.attend import Mask
from meshwright.kernels.attention.paged import (
    DenseCall,
    PagedCall,
    PagedStore,
    RowsCall,
    attend_dense,
    attend_paged,
    attend_rows,
    prompt_kernel,
    rotate_and_store,
    row_kernel,
)
from meshwright.kernels.c.serving_library import Loops, takes
from meshwright.kernels.chooser import uses_triton
from meshwright.model.attention import Cache, LatentAttention, Norms
from meshwright.model.transformer import Block, Transformer
from meshwright.serving.engine.cache.blocks import Move
from meshwright.spec.plan.execution import CacheForm


def to_device(numbers: Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of the host, nested or not, as a tensor on a device, in one copy without a wait.

    torch keeps the pinned memory until the copy is done. An array of "q" is read in place, since torch looks at each
    number of a list, for 40 ns.
    """
    if isinstance(numbers, array) and numbers:
        host = torch.frombuffer(numbers, dtype=torch.int64)
    else:
        host = torch.tensor(numbers, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@final
class HostReading:
    """Tensors on their way to the host. A GPU copies them on a separate stream, while it computes what follows."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start the copies behind all work in the current stream."""
        # Held until the copies are done: freed memory of a device may be written by the next kernel.
        self._tensors, self._host = tensors, tensors
        self._arrived: torch.Event | None = None
        device = tensors[0].device
        if device.type != "cuda":
            return
        stream = _reading_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._arrived = stream.record_event()

    def read(self) -> Sequence[Tensor]:
        """Wait for the tensors and return them on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


@cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@final
class HostCopies:
    """Slots of host memory for the blocks of a cache, each with a block's content in every layer.

    They are pinned for a model on a GPU. Its copies are put into the GPU's stream, in order, without a wait.
    """

    def __init__(self, blocks: Sequence[Tensor], slots: int) -> None:
        """Allocate slots for the stores of a cache (`blocks`, each indexed by block)."""
        self._blocks = blocks
        self._slots = [
            torch.empty((slots, *store.shape[1:]), dtype=store.dtype, pin_memory=store.device.type == "cuda")
            for store in blocks
        ]

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        return sum(store.nbytes for store in self._slots)

    def save(self, block: int, slot: int) -> None:
        """Copy a block's content to a slot."""
        for store, host in zip(self._blocks, self._slots, strict=True):
            host[slot].copy_(store[block], non_blocking=True)

    def load(self, slot: int, block: int) -> None:
        """Copy a slot's content to a block."""
        for store, host in zip(self._blocks, self._slots, strict=True):
            store[block].copy_(host[slot], non_blocking=True)


def group_moves(moves: Iterable[Move]) -> list[list[Move]]:
    """Return the moves in order, with copies that may happen at once in one group, and others alone."""
    groups: list[list[Move]] = []
    targets = set[int]()
    for move in moves:
        needs_own_group = move.kind != "copy" or not targets or move.source in targets or move.target in targets
        if needs_own_group:
            groups.append([])
            targets.clear()
        groups[-1].append(move)
        if move.kind == "copy":
            targets.add(move.target)
    return groups


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Work of a step on a dense copy (packed_step.py) in each layer without a window."""

    keys: int
    """T of its rows."""
    room: int
    """Rows with memory. 0 = the copy is given up."""
    rows: int
    """Rows that attention reads."""
    queries: int
    """Rows of the step that read it. They follow those of earlier copies."""
    gathered: tuple[Tensor, Tensor] | None
    """(L,) rows that are first filled from blocks (L, T / size)."""
    added: tuple[Tensor, Tensor]
    """(queries,) rows and positions of the step's new keys and values."""
    call: DenseCall


@dataclass(slots=True)
class StepPlaces:
    """Storage and visibility of the rows of a step."""

    slots: Tensor
    """(N,) block * size + position within the block, per row."""
    copies: Sequence[CopyStep]
    """Copies for layers without a window. Their queries are the first rows."""
    calls: Mapping[int, Sequence[PagedCall]]
    """Calls by window. Without a window they are of the rows behind those of the copies."""
    rows: RowsCall | None = None
    """The first rows, if compiled loops attend. There are then no copies, and calls are of the rows behind."""


@final
class PagedLayer:
    """The store of one layer: a Past for packed rows of many sequences (B = 1)."""

    length = 0
    """Positions are given with each step."""

    def __init__(
        self, block: Block, number: int, size: int, like: Tensor, loops: Loops | None, form: CacheForm
    ) -> None:  # fmt: skip
        """Allocate `number` blocks of `size` positions, all zero, in the dtype of `like`."""
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
        self.fuses_rotation = False
        """True when `turn` has a kernel here."""
        self._is_stored = False  # whether `turn` has already stored k and v in this pass
        self._copies: dict[int, list[Tensor]] = {}  # by T: keys and values (room, T, K, width)

    @property
    def bytes(self) -> int:
        """Memory of its blocks."""
        return sum(store.bytes for store in self._stores)

    def turn(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, norms: Norms | None
    ) -> bool:  # fmt: skip
        """Norm and rotate q and k, and store k and v, in one kernel on a GPU. Return False if the caller must do so."""
        if not self.fuses_rotation:
            return False
        assert self.places is not None
        arguments = q[0], k[0], v[0], cos.flatten(0, 2), sin.flatten(0, 2), self.places.slots
        self._is_stored = rotate_and_store(*arguments, self.keys, self.values, interleaved=interleaved, norms=norms)
        return self._is_stored

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> Tensor:
        """Attend to the cached positions. The step's calls, not the mask, say which row sees what."""
        assert self.places is not None
        q, k, v = q[0], k[0], v[0]
        news = (k,) if self.low_rank else (k, v)
        # `turn` may have stored them already, together with the rotation.
        for store, new in zip(self._stores, news, strict=True) if not self._is_stored else ():
            store.write(self.places.slots, new, self.loops)
        self._is_stored = False
        done, parts = 0, list[Tensor]()
        if self.places.rows is not None:
            done, stores = len(self.places.rows.last), (self.keys, self.values)
            attended = attend_rows(
                self.loops, q[:done], *stores, self.places.rows, width=v.shape[-1], window=self.window, scale=scale
            )
            parts.append(attended)
        for step in () if self.window else self.places.copies:
            rows = slice(done, done + step.queries)
            copies = self._update_copies(step, [new[rows] for new in news])
            if copies:
                keys, values = copies[0][: step.rows], copies[-1][: step.rows]
                parts.append(attend_dense(q[rows], keys, values, step.call, scale=scale, width=v.shape[-1]))
            done = rows.stop
        if done < len(q):
            calls = self.places.calls[self.window]
            parts.append(attend_paged(q[done:], k[done:], v[done:], self.keys, self.values, calls, scale=scale))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)

    @property
    def tensors(self) -> list[Tensor]:
        """All stored tensors, indexed by block."""
        return [tensor for store in self._stores for tensor in store.tensors]

    @property
    def _stores(self) -> list[PagedStore]:
        return [self.keys] if self.low_rank else [self.keys, self.values]

    def _update_copies(self, step: CopyStep, new_rows: Sequence[Tensor]) -> list[Tensor]:
        """Return keys and values (room, T, K, width) of a copy with those of the step, (queries, K, width) each."""
        if not step.room:
            self._copies.pop(step.keys, None)
            return []
        copies = self._copies.get(step.keys)
        if copies is None or len(copies[0]) < step.room:
            copies = [
                _grow_copy(None if copies is None else copies[number], store, step)
                for number, store in enumerate(self._stores)
            ]
            self._copies[step.keys] = copies
        for copy, store, new in zip(copies, self._stores, new_rows, strict=True):
            if step.gathered is not None:
                rows, blocks = step.gathered
                copy[rows] = store.read(blocks.flatten()).view(len(rows), step.keys, *store.sizes[2:])
            copy[step.added] = new
        return copies

    def copy(self, old: Tensor, new: Tensor) -> None:
        """Copy blocks (C,) to other blocks (C,)."""
        for tensor in self.tensors:
            tensor[new] = tensor[old]

    def clear(self, blocks: Tensor) -> None:
        """Set blocks (C,) to zero."""
        for tensor in self.tensors:
            tensor[blocks] = 0

    def select(self, rows: Tensor) -> None:
        """Refuse: sequences leave and come by their tables."""
        raise TypeError("a paged cache is not selected from: rows of a step name their blocks")


def _grow_copy(old: Tensor | None, store: PagedStore, step: CopyStep) -> Tensor:
    """Return a copy with more room. New rows are zero until they are filled."""
    grown = store.codes.new_zeros(step.room, step.keys, *store.sizes[2:], dtype=store.dtype)
    if old is not None:
        grown[: len(old)] = old
    return grown


@final
class PagedCache:
    """The stores of a model's layers, with two extra blocks behind the last one.

    One stays zero, to pad tables. The other is read by nobody, and takes the rows without a sequence.
    """

    def __init__(
        self, model: Transformer, number: int, size: int, *, form: CacheForm = "model", loops: Loops | None = None,
        slots: int = 0,
    ) -> None:  # fmt: skip
        """Allocate the stores.

        Args:
            loops: Compiled loops that attend, for a model in fp32 on a CPU. None = torch.
            slots: Blocks that host memory has room for.
        """
        self.form: CacheForm = form
        weight = model.embed.weight
        self.loops = loops if takes(weight) else None
        self.number, self.size = number, size
        # Two blocks beyond those of the pool, so that no table can name them by mistake.
        self.zero, self.unread = number, number + 1
        self.layers = [PagedLayer(block, number + 2, size, weight, self.loops, form) for block in model.blocks]
        widest = max(layer.keys.sizes[3] for layer in self.layers)
        self.by_rows, self.attention = (
            row_kernel(weight, widest, model.kernels.prefer) if self.loops is None else (True, "compiled loops")
        )
        """True when decoding rows read blocks in place; and what attends for them and for prompts, and why."""
        first, shape = self.layers[0], model.shape
        group = 1 if shape.mla else shape.heads // shape.kv_heads
        prompts = prompt_kernel(weight, first.keys.sizes[3], first.values.sizes[3], group)
        self.attention += f"; of prompts: {prompts}" if prompts else ""
        for layer in self.layers:
            layer.fuses_rotation = not layer.low_rank and uses_triton(
                "rotate_and_store", weight, prefer=model.kernels.prefer
            )
        self.windows = sorted({layer.window for layer in self.layers})
        self.device = weight.device
        tensors = [tensor for layer in self.layers for tensor in layer.tensors]
        self.host = HostCopies(tensors, slots) if slots else None

    @property
    def widest(self) -> int:
        """No layer sees further back than so many positions. 0 = some layer sees all."""
        return 0 if 0 in self.windows else max(self.windows)

    @property
    def bytes(self) -> int:
        """Memory of all blocks."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def copied_bytes(self) -> int:
        """Bytes of a position in the layers with dense copies, which are those without a window."""
        positions = (self.number + 2) * self.size
        return sum(layer.bytes for layer in self.layers if not layer.window) // positions

    def at(self, places: StepPlaces) -> Cache:
        """Return the cache for a forward pass over rows with these places."""
        for layer in self.layers:
            layer.places = places
        return Cache(len(self.layers), iter(self.layers).__next__)

    def carry_out(self, moves: Sequence[Move]) -> None:
        """Carry out moves, in order."""
        for group in group_moves(moves):
            kind, source, target = group[0]
            if kind == "copy":
                old, new = to_device([move[1:] for move in group], self.device).t()
                for layer in self.layers:
                    layer.copy(old, new)
            else:
                assert self.host is not None
                (self.host.save if kind == "save" else self.host.load)(source, target)

    def clear(self, blocks: Sequence[int]) -> None:
        """Set blocks to zero whose content is not finite, since it would spoil their next owner."""
        for layer in self.layers:
            layer.clear(torch.tensor(blocks, device=self.device))


def bytes_per_block(model: Transformer, size: int, form: CacheForm = "model") -> int:
    """Return the number of bytes of the keys and values of `size` positions in all layers."""
    return PagedCache(model, 1, size, form=form).bytes // 3
