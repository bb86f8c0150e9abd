"""Stored distributions of a teacher: the likeliest next tokens of every position, in the user's cache, by content.

A folder holds two tables, with a row per row of the text in the text's own order, and a list of the rows that exist. A
table is as long as the text but takes only the disk space of written rows. So a run adds the rows that it needs,
another one continues from there, and a killed process loses one batch.

    ids     (rows, S, K) uint16, or uint32 for larger vocabularies
    logs    (rows, S, K + 1) fp16, that of all other tokens last

Letters: S positions of a row, K stored tokens.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.corpus.cache_folder import read_json, write_json
from meshwright.spec.errors import RunError
from meshwright.spec.units import GB
from meshwright.spec.user_cache import default_root
from meshwright.store.durable import free_bytes

_FORMAT = 1
"""Raised whenever the same teacher and text would give other numbers."""
IDS, LOGS, DONE, ABOUT = "ids.bin", "logs.bin", "done.bin", "about.json"
NARROW = 2**16
"""Largest vocabulary whose ids take two bytes."""
ROUNDED = 0.02
"""Largest deviation from 1 of a sum of probabilities with fp16 logarithms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSizes:
    """Sizes of the tables of one teacher over one text."""

    rows: int
    sequence: int
    top: int
    vocab: int

    @property
    def id_type(self) -> np.dtype[Any]:
        """Type of a token."""
        return np.dtype(np.uint16 if self.vocab <= NARROW else np.uint32)

    @property
    def token_bytes(self) -> int:
        """Bytes per position."""
        return self.top * self.id_type.itemsize + (self.top + 1) * 2

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.sequence * self.token_bytes


def cached(*content: object) -> Path:
    """Return the folder in the user's cache for this content."""
    digest = hashlib.blake2b(repr((_FORMAT, *content)).encode(), digest_size=16).hexdigest()
    return default_root() / "teachers" / digest


@dataclass(frozen=True, slots=True)
class TeacherTables:
    """The tables of a folder. Rows that do not exist yet hold arbitrary numbers."""

    folder: Path
    sizes: TableSizes

    def make(self) -> None:
        """Create the files, empty, unless they exist.

        Raises RunError when they have other sizes, which means that somebody changed them.
        """
        sizes = self.sizes
        self.folder.mkdir(parents=True, exist_ok=True)
        description = {"rows": sizes.rows, "sequence": sizes.sequence, "top": sizes.top, "vocab": sizes.vocab}
        if (self.folder / ABOUT).is_file():
            if read_json(self.folder / ABOUT) != description or any(
                (self.folder / name).stat().st_size != size for name, size in self._files().items()
            ):
                raise self._changed_error("")
            return
        for name, size in self._files().items():
            with (self.folder / name).open("wb") as file:
                file.truncate(size)
        write_json(self.folder / ABOUT, description)

    def check(self, ids: NDArray[Any], logs: NDArray[np.float16]) -> None:
        """Raise RunError when rows (B, S, K) and (B, S, K + 1) are no distributions, so somebody changed them."""
        if ids.size and int(ids.max()) >= self.sizes.vocab:
            raise self._changed_error(f": it names token {int(ids.max())} of {self.sizes.vocab}")
        off = np.abs(np.exp(logs, dtype=np.float32).sum(-1) - 1)
        if not bool((off <= ROUNDED).all()):
            raise self._changed_error(": probabilities do not sum to 1")

    def _changed_error(self, how: str) -> RunError:
        return RunError(f"{self.folder} was changed{how}: remove it, and what a teacher says is asked anew")

    def _files(self) -> dict[str, int]:
        sizes = self.sizes
        positions = sizes.rows * sizes.sequence
        return {
            IDS: positions * sizes.top * sizes.id_type.itemsize, LOGS: positions * (sizes.top + 1) * 2, DONE: sizes.rows
        }  # fmt: skip

    def missing(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows among these that do not exist yet."""
        done = np.fromfile(self.folder / DONE, dtype=np.uint8)
        absent: NDArray[np.int64] = numbers[done[numbers] == 0]
        return absent

    def mark(self, numbers: NDArray[np.int64]) -> None:
        """Mark these rows as existing, safe against a power cut."""
        for name in (IDS, LOGS):
            with (self.folder / name).open("r+b") as file:
                os.fsync(file.fileno())
        done = np.memmap(self.folder / DONE, dtype=np.uint8, mode="r+")
        done[numbers] = 1
        done.flush()

    def tables(self, mode: str = "r") -> tuple[NDArray[Any], NDArray[np.float16]]:
        """Return (ids, logs), memory-mapped."""
        sizes = self.sizes
        shape = (sizes.rows, sizes.sequence)
        ids = np.memmap(self.folder / IDS, dtype=sizes.id_type, mode=mode, shape=(*shape, sizes.top))  # type: ignore[call-overload]  # its mode is a literal
        logs = np.memmap(self.folder / LOGS, dtype=np.float16, mode=mode, shape=(*shape, sizes.top + 1))  # type: ignore[call-overload]  # the same
        return ids, logs

    def check_room(self, rows: int) -> None:
        """Raise RunError when the disk has no space for that many more rows."""
        needed, free = rows * self.sizes.row_bytes, free_bytes(self.folder)
        if free is not None and needed > free:
            raise RunError(
                f"the disk is too small for the teacher's targets: they take {needed / GB:.1f} GB "
                f"({self.sizes.token_bytes} bytes per token) in {self.folder}, and {free / GB:.1f} GB are free. "
                "Lower recipe.distillation_top_k or recipe.steps, or move the cache (XDG_CACHE_HOME)"
            )
