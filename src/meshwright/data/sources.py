"""Sources: what `data.path` names, as documents in a fixed order, read as a stream."""

import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, Final, final

from meshwright.data import pieces, rows
from meshwright.spec import Data
from meshwright.spec.errors import DataError

_BINARY_SNIFF_BYTES = 2**13
_NOT_TEXT = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
_NOT_OURS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_MAGIC = "*?["
_ALIKE = 0.8
"""A typing error leaves more of a name (difflib); an ending in common alone makes short names alike to 0.77."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text that is read from its first to its last piece; `pieces` can be walked once."""

    name: str
    pieces: Iterator[str]

    @property
    def text(self) -> str:
        """All of it at once (uses up `pieces`)."""
        return "".join(self.pieces)


@final
class Source:
    """The files (or the hub dataset) behind `data.path`, found and listed but not read."""

    def __init__(self, data: Data) -> None:
        """DataError where nothing is there."""
        self._data: Final = data
        self._dataset: Any = rows.load_hub(data.path) if data.path.startswith("hub:") else None
        try:
            listed, self.folder = ([], None) if self._dataset is not None else _listed(data.path)
        except OSError as error:
            raise DataError(f"data.path={data.path}: {error.filename} cannot be read: {error.strerror}") from error
        optional = self.folder is not None and Path(data.path).expanduser().is_dir()
        self.passed_over: Final = tuple(path for path in listed if optional and _is_binary(path))
        """Files of a folder that are not text. A binary file that is named, or matched by a glob, is an error."""
        left_out = set(self.passed_over)
        self.files: Final = tuple(path for path in listed if path not in left_out)
        if self._dataset is None and not self.files:
            raise DataError(_nothing_found(data.path, listed))

    @property
    def title(self) -> str:
        """What people call it."""
        if self._data.path == "stdlib":
            return f"Python {platform.python_version()} standard library"
        return self._data.path

    def documents(self) -> Iterator[Document]:
        """Every document that is not empty, at most `data.limit_bytes` in all (the last one cut at a line end)."""
        found = self._all()
        return _limited(found, self._data.limit_bytes) if self._data.limit_bytes else found

    def signature(self) -> str:
        """Hash of what tells, without reading, whether the documents are as before: names, sizes, times, inodes."""
        names = self.files if self._dataset is None else [Path(f["filename"]) for f in self._dataset.cache_files]
        seen = hashlib.blake2b(b"" if names else os.urandom(16), digest_size=16)  # held in memory: nothing tells
        seen.update(repr((self._data.path, self._data.text_field, self._data.limit_bytes)).encode())
        for path in names:
            try:
                stat = path.stat()
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}") from error
            seen.update(repr((os.fspath(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ino)).encode())
        return seen.hexdigest()

    def _all(self) -> Iterator[Document]:
        if self._dataset is not None:
            yield from _from_rows(rows.hub(self._dataset, self._data.path, self._data.text_field))
        for path in self.files:
            if path.suffix == ".jsonl":
                yield from _from_rows(rows.jsonl(path, self._data.text_field))
            elif path.suffix == ".parquet":
                yield from _from_rows(rows.parquet(path, self._data.text_field))
            elif path.stat().st_size:
                yield Document(name=os.fspath(path), pieces=pieces.read(path))


def documents(data: Data) -> Iterator[Document]:
    """The documents of `data.path` in a fixed order, streamed: no file is in memory whole."""
    return Source(data).documents()


def _from_rows(found: Iterator[tuple[str, str]]) -> Iterator[Document]:
    return (Document(name=name, pieces=pieces.cut(text)) for name, text in found if text)


def _limited(found: Iterator[Document], limit: int) -> Iterator[Document]:
    """Documents until `limit` bytes have been read from them; each must be read before the next is asked for."""
    left = [limit]
    for document in found:
        if left[0] <= 0:
            return
        yield Document(name=document.name, pieces=_spend(document.pieces, left))


def _spend(found: Iterator[str], left: list[int]) -> Iterator[str]:
    for piece in found:
        size = len(piece.encode())
        if size > left[0]:
            kept = piece.encode()[: left[0]].decode(errors="ignore")
            left[0] = 0
            yield from filter(None, [kept[: kept.rfind("\n") + 1] or kept])
            return
        left[0] -= size
        yield piece


def _listed(path: str) -> tuple[list[Path], Path | None]:
    """Files, and the folder in which a tokenizer may lie beside them."""
    if path == "stdlib":
        return _standard_library(), None
    named = Path(path).expanduser()
    if named.is_dir():
        return [file for file in _walk(named) if file.name not in _NOT_TEXT], named
    if named.exists():
        return [named], named.parent
    if any(mark in path for mark in _MAGIC):
        found = sorted(Path(match) for match in glob.iglob(os.fspath(named), recursive=True))
        return [file for file in found if file.is_file()], None
    raise DataError(f"data.path={path} does not exist: {_nearest(path)}")


def _standard_library() -> list[Path]:
    """Modules of the running Python, without their tests, what others installed, and what its build wrote down."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (file for file in _walk(root, _NOT_OURS) if file.suffix == ".py")
    return [file for file in found if not file.name.startswith("_sysconfigdata")]


def _walk(root: Path, left_out: Collection[str] = ("__pycache__",)) -> Iterator[Path]:
    """Files below a folder in the order of their names, hidden ones left out, links to folders not followed."""
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith(".") or entry.name in left_out:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), left_out)
            elif entry.is_file():
                yield Path(entry.path)


def _is_binary(path: Path) -> bool:
    if path.suffix == ".parquet":
        return False
    with path.open("rb") as file:
        return b"\0" in file.read(_BINARY_SNIFF_BYTES)


def _nearest(path: str) -> str:
    """The existing name most like one that does not exist."""
    named = Path(path).expanduser().absolute()
    folder = next(parent for parent in named.parents if parent.is_dir())
    missing = named.relative_to(folder).parts[0]
    if get_close_matches(path, ["stdlib"]):
        return "did you mean data.path=stdlib?"
    close = get_close_matches(missing, os.listdir(folder), n=1, cutoff=_ALIKE)
    return f"the nearest name is {folder / close[0]}" if close else f"{folder} exists and holds nothing of that name"


def _nothing_found(path: str, listed: list[Path]) -> str:
    if listed:
        names = ", ".join(file.name for file in islice(listed, 3))
        return f"data.path={path} holds no text, only binary files ({names}): give a folder, file or glob of text"
    if any(mark in path for mark in _MAGIC):
        return f"data.path={path} matches no file: check the pattern (** goes through folders)"
    return f"data.path={path} holds no files: put text, .jsonl or .parquet files there"
