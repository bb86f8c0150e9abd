"""Corpus: the tokens of a text on disk, memory-mapped, with counts made during encoding.

Cache folders are completed under a temporary name and then renamed, by one process at a time.
"""

import contextlib
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, final

import numpy as np
from numpy.typing import NDArray

from meshwright.data.text.rows import MalformedRows
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec import user_cache
from meshwright.spec.errors import DataError

_SMALL_BYTES = 2**26


@final
class TokenFile:
    """Reader of parts of a file, without mapping it.

    Touching a page through a mapping can make 2 MiB resident (Linux maps large folios whole), so random windows would
    make the process as large as the corpus. Reading them is also ten times faster.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path, self._dtype = path, dtype
        self._descriptor: Final = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        try:  # noqa: SIM105  # contextlib may be gone by then
            os.close(self._descriptor)
        except (AttributeError, OSError, TypeError):  # it may never have been opened
            pass

    def read(self, begin: int, end: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return tokens [begin, end). Raises DataError when the file has become shorter."""
        size = self._dtype.itemsize
        data = os.pread(self._descriptor, (end - begin) * size, begin * size)
        if len(data) != (end - begin) * size:
            raise DataError(f"{self._path} was truncated during reading: rerun to rebuild the cache")
        return np.frombuffer(data, dtype=self._dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """Documents end to end."""

    is_stored: ClassVar[bool] = False
    """It is that of a token store, of which `tokens` has the beginning."""

    tokens: NDArray[np.unsignedinteger[Any]]
    """[num_tokens] uint16 or uint32, read-only, begin and end marks included."""
    starts: NDArray[np.int64]
    """[num_documents] index of the first token of each document."""
    num_tokens: int
    num_bytes: int
    """UTF-8 bytes of the text, without marks."""
    num_documents: int
    file: TokenFile | None = None
    """The tokens' file, if the system can read at an offset."""
    marks: NDArray[np.uint8] | None = None
    """One byte per token of samples: its role, and whether it is trained (chat/encoder.py, TRAINED). `num_tokens` and
    `num_bytes` then count trained tokens. None = text, all of which is trained."""
    pairs: bool = False
    """Documents come in pairs: a preference, the better answer first."""
    same_pairs: int = 0
    """Number of pairs with two equal answers."""
    first: int = 0
    """In a mixture, the documents of earlier sources, which keeps numbers of answers unique."""
    rows: NDArray[np.int64] | None = None
    """[num_documents] row of the file of each sample. A conversation may give several samples. None = text."""

    def read(self, begin: int, end: int) -> NDArray[np.unsignedinteger[Any]]:
        """Return tokens [begin, end), leaving nothing of the file resident."""
        return self.tokens[begin:end] if self.file is None else self.file.read(begin, end)

    @property
    def files(self) -> int:
        """Shards of a token store."""
        return 0

    @property
    def parts(self) -> tuple["TokenStream", ...]:
        """The stream itself, as the only source."""
        return (self,)

    @property
    def size(self) -> int:
        """Tokens that are read, trained or not."""
        return len(self.tokens)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per trained token."""
        return self.num_bytes / max(1, self.num_tokens)

    def release(self) -> None:
        """Release the resident pages of a long list of starts. They stay in the system's cache."""
        mapping: object = self.starts.base
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if advice is not None and isinstance(mapping, mmap.mmap) and self.starts.nbytes > _SMALL_BYTES:
            mapping.madvise(advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStream:
    """Streams of the sources of a mixture. Its counts are their sums."""

    parts: tuple[TokenStream, ...]
    weights: tuple[float, ...]
    """Weight of each source, above 0, with any sum."""

    @property
    def size(self) -> int:
        """Tokens read in one pass over every source, trained or not."""
        return sum(part.size for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """Sum of TokenStream.num_tokens."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Sum of TokenStream.num_bytes."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_documents(self) -> int:
        """Sum of TokenStream.num_documents."""
        return sum(part.num_documents for part in self.parts)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes per token, averaged by weight."""
        return self.mean([part.bytes_per_token for part in self.parts])

    def mean(self, values: Sequence[float]) -> float:
        """Return the weighted mean of a value per part, over parts with a token to predict, 0 if none has one."""
        weighted = [
            (weight, value)
            for part, weight, value in zip(self.parts, self.weights, values, strict=True)
            if part.num_tokens > 1
        ]
        whole = sum(weight for weight, _ in weighted)
        return sum(weight / whole * value for weight, value in weighted)


Stream = TokenStream | MixedStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training and held-out data."""

    train: Stream
    validation: Stream
    tokenizer: Tokenizer
    fingerprint: str
    """Hash of texts, tokenizer, split and format: equal fingerprints mean equal tokens."""
    key: str
    """Name of its folder in the cache. A mixture's is derived from its fingerprint."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Column that samples do not use -> number of rows that have it. Empty for text."""
    malformed: MalformedRows = field(default_factory=MalformedRows)
    """Rows that data.malformed=skip left out. They are in no stream."""


Progress = Callable[[int, int], None]
"""Called with (bytes of text or rows done, total)."""


def map_numbers(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Return the numbers in a file, read-only."""
    if not count:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` when the block succeeds and is removed when it fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    old = new.with_name(new.name + ".old")
    try:
        yield new
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first, with the same content
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Let one process at a time create this folder, after removing what killed processes left of it."""
    with user_cache.lock(folder) as locked:
        for leftover in folder.parent.glob(f".{folder.name}.*") if locked else ():
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
        yield


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, or {} if there is none."""
    content = None
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object to a file that appears complete or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with new.open("wb") as file:
        file.write(json.dumps(content, indent=1).encode())
        sync(file)
    new.replace(path)


def sync(file: BinaryIO) -> None:
    """Flush a file to the disk."""
    file.flush()
    os.fsync(file.fileno())
