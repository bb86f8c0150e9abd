"""Corpus: the tokens of a text on disk, memory-mapped, and what was counted while they were made."""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from meshwright.data.rows import MalformedRows
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec.errors import DataError

_SMALL_BYTES = 2**26


@final
class TokenFile:
    """Reads at a place without mapping it.

    A page that is touched through a mapping can make 2 MiB resident (Linux maps large folios whole), so windows at
    random would make the process as large as the corpus; and they are read ten times faster like this.
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
        """Tokens [begin, end); DataError where the file has become shorter."""
        size = self._dtype.itemsize
        found = os.pread(self._descriptor, (end - begin) * size, begin * size)
        if len(found) != (end - begin) * size:
            raise DataError(f"{self._path} was truncated while it was read: run again, it will be made anew")
        return np.frombuffer(found, dtype=self._dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """Documents end to end."""

    tokens: NDArray[np.unsignedinteger[Any]]
    """[num_tokens] uint16 or uint32, read-only; marks included."""
    starts: NDArray[np.int64]
    """[num_documents] where each document begins."""
    num_tokens: int
    num_bytes: int
    """UTF-8 bytes of the text; marks count nothing."""
    num_documents: int
    file: TokenFile | None = None
    """The tokens' file, where the system can read at a place."""
    marks: NDArray[np.uint8] | None = None
    """Of samples: a byte a token, who says it and whether it is trained (sample_encoder.TRAINED). Their `num_tokens`
    and `num_bytes` count what is trained. None = text, all of which is trained."""
    pairs: bool = False
    """Documents come in pairs: a preference, the better one first."""
    same_pairs: int = 0
    """Of those, with two answers that are the same."""
    first: int = 0
    """Of a mixture: documents of the sources before, so that the numbers of answers are of all sources."""
    rows: NDArray[np.int64] | None = None
    """Of samples: [num_documents] which row of the file each is of; a conversation may give several. None = text."""

    def read(self, begin: int, end: int) -> NDArray[np.unsignedinteger[Any]]:
        """Tokens [begin, end), leaving nothing of the file resident."""
        return self.tokens[begin:end] if self.file is None else self.file.read(begin, end)

    @property
    def parts(self) -> tuple["TokenStream", ...]:
        """Itself, as the only source."""
        return (self,)

    @property
    def size(self) -> int:
        """Tokens that are read, trained or not."""
        return len(self.tokens)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token that is trained."""
        return self.num_bytes / max(1, self.num_tokens)

    def release(self) -> None:
        """Give back the resident pages of a long list of starts; they stay in the system's cache."""
        advice, mapped = getattr(mmap, "MADV_DONTNEED", None), self._mapping()
        if advice is not None and mapped is not None and self.starts.nbytes > _SMALL_BYTES:
            mapped.madvise(advice)

    def _mapping(self) -> mmap.mmap | None:
        base: object = self.starts.base
        return base if isinstance(base, mmap.mmap) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStream:
    """The streams of the sources of a mixture; its counts are those of all of them."""

    parts: tuple[TokenStream, ...]
    weights: tuple[float, ...]
    """Of each source, above 0, of any sum."""

    @property
    def size(self) -> int:
        """Tokens that are read in one pass over every source, trained or not."""
        return sum(part.size for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """As of a TokenStream."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """As of a TokenStream."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_documents(self) -> int:
        """As of a TokenStream."""
        return sum(part.num_documents for part in self.parts)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes per token where tokens are mixed by weight."""
        return self.mean([part.bytes_per_token for part in self.parts])

    def mean(self, values: Sequence[float]) -> float:
        """The mean of a value of each part, by weight, over the parts that have a token to predict; 0 of none."""
        found = [
            (weight, value)
            for part, weight, value in zip(self.parts, self.weights, values, strict=True)
            if part.num_tokens > 1
        ]
        whole = sum(weight for weight, _ in found)
        return sum(weight / whole * value for weight, value in found)


Stream = TokenStream | MixedStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What is trained on and what is held out."""

    train: Stream
    validation: Stream
    tokenizer: Tokenizer
    fingerprint: str
    """Hash of texts, tokenizer, split and format: equal fingerprints mean equal tokens."""
    key: str
    """Name of its folder in the cache; of a mixture that of its fingerprint."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Of rows that are samples: columns that none is made of, and how many rows have each."""
    malformed: MalformedRows = field(default_factory=MalformedRows)
    """Rows that data.malformed=skip left out; they are in no stream."""
