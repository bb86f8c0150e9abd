"""Split: choice of held-out documents by their content alone."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.text.sources import Document

TRAIN, HELD_OUT = 0, 1

_FEW_DOCUMENTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Hashes and sizes from one reading of the documents. Documents without text are not counted."""

    hashes: NDArray[np.uint64]
    """[documents] 64-bit hashes of the contents."""
    sizes: NDArray[np.int64]
    """[documents] UTF-8 bytes."""

    @property
    def digest(self) -> str:
        """Hash of all contents in order."""
        content = hashlib.blake2b(self.hashes.tobytes(), digest_size=16)
        content.update(self.sizes.tobytes())
        return content.hexdigest()

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of text."""
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Held-out documents by `held`, or if `cut_bytes` >= 0, all text behind this many bytes."""

    held: NDArray[np.bool_]
    cut_bytes: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPart:
    """A piece and its stream."""

    stream: int
    """TRAIN or HELD_OUT."""
    first: bool
    """A document (or the held-out rest of one) begins here."""
    last: bool
    text: str


class Reading:
    """Hashes and sizes of documents, collected while they are read for any purpose."""

    def __init__(self) -> None:
        self._hashes, self._sizes = array("Q"), array("q")
        self.num_bytes = 0
        """UTF-8 bytes so far."""

    @property
    def num_documents(self) -> int:
        """Documents read to their end."""
        return len(self._sizes)

    def document(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield the pieces of one document, counting them."""
        seen, before = hashlib.blake2b(digest_size=8), self.num_bytes
        for piece in pieces:
            text = piece.encode()
            seen.update(text)
            self.num_bytes += len(text)
            yield piece
        if self.num_bytes > before:
            self._hashes.append(int.from_bytes(seen.digest(), "little"))
            self._sizes.append(self.num_bytes - before)

    def survey(self) -> Survey:
        """Return the collected survey."""
        return Survey(hashes=np.array(self._hashes, dtype=np.uint64), sizes=np.array(self._sizes, dtype=np.int64))


def survey(documents: Iterable[Document]) -> Survey:
    """Return hash and size of every document. Reads each once, a piece at a time."""
    reading = Reading()
    for document in documents:
        for _ in reading.document(document.pieces):
            pass
    return reading.survey()


def choose(surveyed: Survey, share: float) -> Split:
    """Hold out about `share` of the bytes.

    Documents are taken in the order of their hashes while they fit, equal ones together. If there are few documents, or
    each is too large, the end of the text is held out instead.
    """
    held = np.zeros(len(surveyed.sizes), dtype=bool)
    target = round(share * surveyed.num_bytes)
    if not target:
        return Split(held=held)
    if len(held) >= _FEW_DOCUMENTS:
        held = _choose_by_hash(surveyed, target)
        if surveyed.sizes[held].sum() >= target / 2:
            return Split(held=held)
    return Split(held=np.zeros_like(held), cut_bytes=surveyed.num_bytes - target)


def _choose_by_hash(surveyed: Survey, target: int) -> NDArray[np.bool_]:
    distinct, where = np.unique(surveyed.hashes, return_inverse=True)
    sizes = np.bincount(where, weights=surveyed.sizes).astype(np.int64)
    taken = np.zeros(len(distinct), dtype=bool)
    remaining, enough = target, target // 200
    for i, size in enumerate(sizes):
        if size <= remaining:
            taken[i] = True
            remaining -= int(size)
            if remaining <= enough:
                break
    return taken[where]


def parts(documents: Iterable[Document], split: Split, reading: Reading) -> Iterator[SplitPart]:
    """Yield every piece with its stream, in order. `reading` counts along to detect text changed since the survey."""
    for document in documents:
        number = reading.num_documents
        counted = reading.document(filter(None, document.pieces))
        if split.cut_bytes >= 0:
            yield from _mark_ends(_divide(counted, split.cut_bytes, reading))
        else:
            stream = HELD_OUT if number < len(split.held) and split.held[number] else TRAIN
            yield from _mark_ends((stream, piece) for piece in counted)


def _divide(pieces: Iterable[str], cut_bytes: int, reading: Reading) -> Iterator[tuple[int, str]]:
    for piece in pieces:
        size = len(piece.encode())
        start = reading.num_bytes - size
        if reading.num_bytes <= cut_bytes:
            yield TRAIN, piece
        elif start >= cut_bytes:
            yield HELD_OUT, piece
        else:
            at = _line_end(piece, len(piece.encode()[: cut_bytes - start].decode(errors="ignore")))
            yield from ((stream, text) for stream, text in ((TRAIN, piece[:at]), (HELD_OUT, piece[at:])) if text)


def _line_end(text: str, near: int) -> int:
    """Return the line end at or before `near`, else the first one behind it, else `near` itself."""
    return text.rfind("\n", 0, near) + 1 or (text.find("\n", near) + 1) % len(text) or near


def _mark_ends(pieces: Iterable[tuple[int, str]]) -> Iterator[SplitPart]:
    """Mark each piece of a document as the first or last of its stream."""
    waiting, previous = None, None
    for piece in pieces:
        if waiting is not None:
            yield SplitPart(
                stream=waiting[0], first=waiting[0] != previous, last=piece[0] != waiting[0], text=waiting[1]
            )
            previous = waiting[0]
        waiting = piece
    if waiting is not None:
        yield SplitPart(stream=waiting[0], first=waiting[0] != previous, last=True, text=waiting[1])
