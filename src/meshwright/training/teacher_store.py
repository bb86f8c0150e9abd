"""What is kept of a teacher on disk: of every position its likeliest next tokens, in the user's cache, by content.

A folder holds two tables, a row for each row of the text (whatever order a run reads them in), and which rows are
there. A table is as long as the text and takes room for what is written. So a run fills in what it needs, another one
goes on with that, and a process that is killed loses one batch.

    ids     (rows, S, K) uint16, or uint32 where the vocabulary is larger
    logs    (rows, S, K + 1) fp16, that of all other tokens last

Letters: S positions of a row, K kept tokens.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.cache_folder import read_json, write_json
from meshwright.spec.errors import RunError
from meshwright.spec.units import GB
from meshwright.spec.user_cache import default_root
from meshwright.store.durable import free_bytes

_FORMAT = 1
"""Raised whenever the same teacher and text would give other numbers."""
IDS, LOGS, DONE, ABOUT = "ids.bin", "logs.bin", "done.bin", "about.json"
NARROW = 2**16
"""The largest vocabulary whose ids take two bytes."""
ROUNDED = 0.02
"""By so much probabilities of fp16 logarithms may miss 1 together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSizes:
    """Of what is kept of one teacher over one text."""

    rows: int
    sequence: int
    top: int
    vocab: int

    @property
    def id_type(self) -> np.dtype[Any]:
        """Of a token."""
        return np.dtype(np.uint16 if self.vocab <= NARROW else np.uint32)

    @property
    def token_bytes(self) -> int:
        """Of one position."""
        return self.top * self.id_type.itemsize + (self.top + 1) * 2

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.sequence * self.token_bytes


def cached(*content: object) -> Path:
    """Where the user's cache has what this content gives."""
    digest = hashlib.blake2b(repr((_FORMAT, *content)).encode(), digest_size=16).hexdigest()
    return default_root() / "teachers" / digest


@dataclass(frozen=True, slots=True)
class TeacherTables:
    """The tables of a folder. Rows that are not there yet hold anything."""

    folder: Path
    sizes: TableSizes

    def make(self) -> None:
        """The files, empty, where they are not there; RunError where the disk has no room for a name, or where they
        are of other sizes, so that somebody changed them."""
        sizes = self.sizes
        self.folder.mkdir(parents=True, exist_ok=True)
        said = {"rows": sizes.rows, "sequence": sizes.sequence, "top": sizes.top, "vocab": sizes.vocab}
        if (self.folder / ABOUT).is_file():
            if read_json(self.folder / ABOUT) != said or any(
                (self.folder / name).stat().st_size != size for name, size in self._files().items()
            ):
                raise self._changed("")
            return
        for name, size in self._files().items():
            with (self.folder / name).open("wb") as file:
                file.truncate(size)
        write_json(self.folder / ABOUT, said)

    def check(self, ids: NDArray[Any], logs: NDArray[np.float16]) -> None:
        """RunError where rows (B, S, K) and (B, S, K + 1) are no distributions, so that somebody changed them."""
        if ids.size and int(ids.max()) >= self.sizes.vocab:
            raise self._changed(f": it names token {int(ids.max())} of {self.sizes.vocab}")
        off = np.abs(np.exp(logs, dtype=np.float32).sum(-1) - 1)
        if not bool((off <= ROUNDED).all()):
            raise self._changed(": probabilities do not sum to 1")

    def _changed(self, how: str) -> RunError:
        return RunError(f"{self.folder} was changed{how}: remove it, and what a teacher says is asked anew")

    def _files(self) -> dict[str, int]:
        each = self.sizes
        positions = each.rows * each.sequence
        return {
            IDS: positions * each.top * each.id_type.itemsize, LOGS: positions * (each.top + 1) * 2, DONE: each.rows
        }  # fmt: skip

    def missing(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of these rows are not there."""
        done = np.fromfile(self.folder / DONE, dtype=np.uint8)
        found: NDArray[np.int64] = numbers[done[numbers] == 0]
        return found

    def mark(self, numbers: NDArray[np.int64]) -> None:
        """These rows are there, also after a power cut."""
        for name in (IDS, LOGS):
            with (self.folder / name).open("r+b") as file:
                os.fsync(file.fileno())
        done = np.memmap(self.folder / DONE, dtype=np.uint8, mode="r+")
        done[numbers] = 1
        done.flush()

    def tables(self, mode: str = "r") -> tuple[NDArray[Any], NDArray[np.float16]]:
        """(ids, logs), mapped."""
        each = self.sizes
        shape = (each.rows, each.sequence)
        ids = np.memmap(self.folder / IDS, dtype=each.id_type, mode=mode, shape=(*shape, each.top))  # type: ignore[call-overload]  # its mode is a literal
        logs = np.memmap(self.folder / LOGS, dtype=np.float16, mode=mode, shape=(*shape, each.top + 1))  # type: ignore[call-overload]  # the same
        return ids, logs

    def check_room(self, rows: int) -> None:
        """RunError where the disk has no room for so many more rows."""
        needed, free = rows * self.sizes.row_bytes, free_bytes(self.folder)
        if free is not None and needed > free:
            raise RunError(
                f"the disk is too small for the teacher's targets: they take {needed / GB:.1f} GB "
                f"({self.sizes.token_bytes} bytes per token) in {self.folder}, and {free / GB:.1f} GB are free. "
                "Lower recipe.distillation_top_k or recipe.steps, or move the cache (XDG_CACHE_HOME)"
            )
