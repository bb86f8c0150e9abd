"""Rows of a token store, in an order that is computed from (seed, epoch, number) and reads few shards at a time.

A window lies within one shard. An epoch shuffles the shards, cuts them into blocks of 16, and shuffles the windows of
each block. So a row is found without a list of rows, and a run needs the shards of one block and soon of the next. The
order depends on the store and the seed alone, not on ranks, workers or restarts.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sequences.windows import Sequences, gather, permute
from meshwright.data.stored.shard_cache import StoredStream
from meshwright.spec.errors import DataError


@final
class _Epoch:
    """Order of one epoch: shards by block, and where blocks begin."""

    def __init__(self, windows: NDArray[np.int64], block_shards: int, seed: int | None, epoch: int) -> None:
        number = len(windows)
        order = np.arange(number, dtype=np.int64)
        self.shards: Final = order if seed is None else permute(order, number, seed=seed, epoch=epoch)
        self.ends: Final = np.cumsum(windows[self.shards])
        """[shards] windows up to and with each shard of the order."""
        self.block_shards, self.seed, self.epoch = block_shards, seed, epoch

    def block_of(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the blocks of places in the epoch: [N] -> [N]."""
        return np.searchsorted(self.ends, places, side="right") // self.block_shards

    def shards_of(self, block: int) -> NDArray[np.int64]:
        """Return the shards of a block."""
        return self.shards[block * self.block_shards : (block + 1) * self.block_shards]

    def locate(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard of each place, and the window within it: [N] -> [N], [N]."""
        if self.seed is not None:
            places = places.copy()
            blocks = self.block_of(places)
            for block in np.unique(blocks).tolist():
                first, last = block * self.block_shards, min(len(self.ends), (block + 1) * self.block_shards)
                begin = int(self.ends[first - 1]) if first else 0
                inside = blocks == block
                number = int(self.ends[last - 1]) - begin
                digest = hashlib.blake2b(f"block {self.seed} {self.epoch} {block}".encode(), digest_size=8).digest()
                seed = int.from_bytes(digest, "little")
                places[inside] = begin + permute(places[inside] - begin, number, seed=seed, epoch=0)
        slots = np.searchsorted(self.ends, places, side="right")
        begins = np.where(slots > 0, self.ends[slots - 1], 0)
        return self.shards[slots], places - begins


@final
class StoredRows:
    """Training order over a store: row c of a run is at place c mod n of epoch c div n, n = len(self)."""

    def __init__(
        self, stream: StoredStream, *, sequence: int, tokenizer_separator: bool, seed: int, shuffle: bool = True
    ) -> None:
        """Take a store. Raises DataError when none of its shards has a whole window."""
        self._stream, self._sequence, self._separator = stream, sequence, tokenizer_separator
        self._seed = seed if shuffle else None
        self._windows: Final = np.maximum(0, stream.cache.shards.tokens - 1) // sequence
        self._firsts: Final = np.cumsum(self._windows) - self._windows
        """[shards] number of the first window of each shard."""
        self._length: Final = int(self._windows.sum())
        self._epoch: Final = lru_cache(maxsize=3)(partial(_Epoch, self._windows, stream.shuffled_shards, self._seed))
        if not self._length:
            longest = int(stream.cache.shards.tokens.max(initial=0))
            raise DataError(
                f"recipe.sequence={sequence} needs shards of {sequence + 1} tokens, and the longest has {longest}: "
                f"take recipe.sequence={max(1, longest - 1)} or less"
            )

    def __len__(self) -> int:
        """Windows of one epoch."""
        return self._length

    def take(self, cursor: int, count: int) -> Sequences:
        """Return rows [cursor, cursor + count) of the run, and fetch the shards of the next ones in a thread."""
        batch = self.rows_of(self.windows(cursor, count))
        self._stream.cache.prefetch(self.shards_ahead(cursor + count))
        return batch

    def windows(self, cursor: int, count: int) -> NDArray[np.int64]:
        """Return the numbers of the windows of these rows, [count], counted through the store."""
        epochs, places = np.divmod(np.arange(cursor, cursor + count, dtype=np.int64), self._length)
        numbers = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            shards, windows = self._epoch(epoch).locate(places[epochs == epoch])
            numbers[epochs == epoch] = self._firsts[shards] + windows
        return numbers

    def rows_of(self, numbers: NDArray[np.int64]) -> Sequences:
        """Return the windows of these numbers."""
        shards = np.searchsorted(self._firsts + self._windows, numbers, side="right")
        needed, packed = np.unique(shards).tolist(), False
        self._stream.cache.fetch(needed)
        # Filled shard by shard: joining and sorting parts would copy each token twice more.
        dtypes = {"tokens": np.int64, "targets": np.int64, "documents": np.int32, "positions": np.int32}
        whole = {name: np.empty((len(numbers), self._sequence), dtype) for name, dtype in dtypes.items()}
        for shard in needed:
            rows = np.flatnonzero(shards == shard)
            begins = (numbers[rows] - self._firsts[shard]) * self._sequence
            part = gather(self._stream.cache.open(shard), begins, self._sequence, self._separator)
            packed = packed or part.packed
            for name, array in whole.items():
                array[rows] = getattr(part, name)
        return Sequences(**whole, packed=packed)

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """Yield all windows once, `count` at a time, or `limit` > 0 of them, spread evenly. None is padded."""
        number = min(limit, self._length) if limit else self._length
        for first in range(0, number, count):
            chosen = np.arange(first, min(number, first + count), dtype=np.int64)
            yield self.rows_of(chosen * self._length // number)

    def shards_ahead(self, cursor: int) -> Sequence[int]:
        """Return the shards of the block of a row and of the next block, in the order of need."""
        epoch, row = divmod(cursor, self._length)
        block = int(self._epoch(epoch).block_of(np.array([row]))[0])
        is_last = (block + 1) * self._stream.shuffled_shards >= len(self._windows)
        next_block = self._epoch(epoch + 1).shards_of(0) if is_last else self._epoch(epoch).shards_of(block + 1)
        ahead = np.concatenate([self._epoch(epoch).shards_of(block), next_block])
        return list(dict.fromkeys(shard for shard in ahead.tolist() if self._windows[shard]))
