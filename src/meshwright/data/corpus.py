"""Corpus: the tokens of a text on disk, memory-mapped, and what was counted while they were made."""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.tokenizer import Tokenizer


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

    def document(self, number: int) -> NDArray[np.unsignedinteger[Any]]:
        """The tokens of one document, marks included."""
        end = self.starts[number + 1] if number + 1 < self.num_documents else self.num_tokens
        return self.tokens[self.starts[number] : end]

    def documents(self) -> Iterator[NDArray[np.unsignedinteger[Any]]]:
        """Every document in order."""
        return (self.document(number) for number in range(self.num_documents))

    def release(self) -> None:
        """Give back the resident pages of the files; they stay in the system's cache and come again when touched.

        Without this, sampling at random makes the process as large as the corpus.
        """
        advice = getattr(mmap, "MADV_DONTNEED", None)
        for array in (self.tokens, self.starts):
            mapped: object = array.base
            if advice is not None and isinstance(mapped, mmap.mmap):
                mapped.madvise(advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What is trained on and what is held out."""

    train: TokenStream
    validation: TokenStream
    tokenizer: Tokenizer
    fingerprint: str
    """Hash of texts, tokenizer, split and format: equal fingerprints mean equal tokens."""
    key: str
    """Name of its folder in the cache."""
