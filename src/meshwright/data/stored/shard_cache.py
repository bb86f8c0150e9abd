"""Shards of a token store, opened where they are needed: in place, or copied from a URL into a bounded folder.

All ranks of a machine share the folder. Shards that were opened longest ago are removed first. An open file stays
readable behind its removal, so that a rank that lags is not disturbed.
"""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, final

import numpy as np

from meshwright.data.corpus.corpus import TokenFile, TokenStream, map_numbers
from meshwright.data.stored.index import ALIGNED, Shards, damaged
from meshwright.remote.locations import Location
from meshwright.remote.transfer import THREADS, download, hash_file
from meshwright.spec import user_cache
from meshwright.spec.errors import MeshwrightError

_OPEN_SHARDS: Final = 64
"""Shards that stay open, each with one descriptor and its starts."""
log = logging.getLogger(__name__)


@final
class ShardCache:
    """Opened shards of one side of a store."""

    def __init__(self, location: Location, shards: Shards, vocab: int, folder: Path, limit_bytes: int) -> None:
        """Take a store.

        Args:
            location: The store.
            shards: Those of one side.
            vocab: Ids of its tokenizer, which decide the width of stored ones.
            folder: Where copies are kept. A local store has none.
            limit_bytes: Most bytes of copies.
        """
        self.location, self.shards = location, shards
        self._dtype: Final = np.dtype(np.uint16 if vocab <= 2**16 else np.uint32)
        self._folder, self._limit_bytes = folder, limit_bytes
        self._open: OrderedDict[int, TokenStream] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: tuple[tuple[int, ...], Future[None]] | None = None

    def open(self, number: int) -> TokenStream:
        """Return a shard, fetched if it is not here. Raises DataError for a missing or damaged one, StoreError."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
        stream = self._read(number)
        with self._lock:
            self._open[number] = stream
            while len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        return stream

    def fetch(self, numbers: Sequence[int]) -> None:
        """Copy shards that are not here from behind a URL, several at once, and make room for them first."""
        if self.location.local is not None or not (missing := self._missing(numbers)):
            return
        (self._folder / "shards").mkdir(parents=True, exist_ok=True)
        with user_cache.lock(self._folder / "shards"):
            missing = self._missing(missing)  # another rank may have been first
            self._make_room(missing)
            download([
                (self.location / self.shards.file[number], self._path(number), self.shards.sha256[number])
                for number in missing
            ])  # fmt: skip

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Fetch, check and open shards in a thread, and close all others. Failures are left to whoever needs them."""
        wanted = tuple(numbers)
        if self._ahead is not None and (self._ahead[0] == wanted or not self._ahead[1].done()):
            return
        with self._lock:
            # A file that is removed takes its space until it is closed.
            for number in self._open.keys() - set(wanted):
                del self._open[number]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._ahead = wanted, self._pool.submit(self._fetch_ahead, wanted)

    def _fetch_ahead(self, numbers: Sequence[int]) -> None:
        try:
            # A few at a time: the folder is locked meanwhile.
            for first in range(0, len(numbers), THREADS):
                group = numbers[first : first + THREADS]
                self.fetch(group)
                for number in group:
                    self.open(number)
        except MeshwrightError as error:
            log.debug("shards ahead: %s", error)

    def _missing(self, numbers: Sequence[int]) -> list[int]:
        with self._lock:
            closed = [number for number in numbers if number not in self._open]
        return [number for number in closed if not self._is_here(number)]

    def _path(self, number: int) -> Path:
        return (self.location.local or self._folder) / self.shards.file[number]

    def _is_here(self, number: int) -> bool:
        try:
            return self._path(number).stat().st_size == int(self.shards.bytes[number])
        except OSError:
            return False

    def _read(self, number: int) -> TokenStream:
        path = self._path(number)
        while True:
            if is_fresh := not self._is_here(number):
                if self.location.local is not None:
                    raise damaged(self.location, self.shards.file[number], "is missing or cut off")
                self.fetch([number])
            try:
                stream = self._map(path, number)
                # The descriptor is open: whoever removes the file now does not disturb the check.
                if is_fresh or hash_file(path) == self.shards.sha256[number]:
                    os.utime(path)
                    return stream
            except FileNotFoundError:  # another process made room
                continue
            if self.location.local is not None:
                raise damaged(self.location, self.shards.file[number], "is damaged: it has another hash than recorded")
            path.unlink(missing_ok=True)

    def _map(self, path: Path, number: int) -> TokenStream:
        tokens, documents = int(self.shards.tokens[number]), int(self.shards.documents[number])
        behind = -(-tokens * self._dtype.itemsize // ALIGNED) * ALIGNED
        return TokenStream(
            tokens=map_numbers(path, self._dtype, tokens),
            starts=np.fromfile(path, np.int64, documents, offset=behind),
            num_tokens=tokens,
            num_bytes=int(self.shards.text_bytes[number]),
            num_documents=documents,
            file=TokenFile(path, self._dtype) if hasattr(os, "pread") else None,
        )

    def _make_room(self, numbers: Sequence[int]) -> None:
        """Remove shards, the longest unused first, until these fit below the limit."""
        paths = [path for path in (self._folder / "shards").iterdir() if not path.name.startswith(".")]
        files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in paths)
        needed = sum(size for _, size, _ in files) + int(self.shards.bytes[list(numbers)].sum()) - self._limit_bytes
        for _, size, path in files:
            if needed <= 0:
                return
            path.unlink(missing_ok=True)
            needed -= size


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStream(TokenStream):
    """Stream of all shards of a store. `tokens` and `starts` are the beginning of its first one, for reports."""

    is_stored: ClassVar[bool] = True
    cache: ShardCache
    shuffled_shards: int

    @property
    def files(self) -> int:
        """Shards of training text."""
        return len(self.cache.shards.file)

    @property
    def size(self) -> int:
        """Tokens of all shards."""
        return self.num_tokens
