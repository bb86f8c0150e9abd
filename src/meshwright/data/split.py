"""Split: which documents are held out for evaluation, decided by their content and nothing else."""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.sources import Document

TRAIN, HELD_OUT = 0, 1

_FEW_DOCUMENTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one reading of the documents tells; documents without text are not counted."""

    hashes: NDArray[np.uint64]
    """[documents] 64 bits of each one's content."""
    sizes: NDArray[np.int64]
    """[documents] UTF-8 bytes."""

    @property
    def digest(self) -> str:
        """Hash of all contents in their order."""
        found = hashlib.blake2b(self.hashes.tobytes(), digest_size=16)
        found.update(self.sizes.tobytes())
        return found.hexdigest()

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of text."""
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Whole documents by `held`; or, where `cut_bytes` >= 0, all text behind so many bytes."""

    held: NDArray[np.bool_]
    cut_bytes: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPart:
    """A piece on its way to a stream."""

    stream: int
    """TRAIN or HELD_OUT."""
    first: bool
    """A document (or the held-out rest of one) begins here."""
    last: bool
    text: str


class Reading:
    """Hashes and sizes of documents, gathered while they are read for whatever purpose."""

    def __init__(self) -> None:
        self._hashes, self._sizes = array("Q"), array("q")
        self.num_bytes = 0
        """UTF-8 bytes so far."""

    @property
    def num_documents(self) -> int:
        """Documents read to their end."""
        return len(self._sizes)

    def document(self, pieces: Iterable[str]) -> Iterator[str]:
        """The pieces of one document, counted as they pass."""
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
        """What was gathered."""
        return Survey(hashes=np.array(self._hashes, dtype=np.uint64), sizes=np.array(self._sizes, dtype=np.int64))


def survey(found: Iterable[Document]) -> Survey:
    """Hash and size of every document; reads each once, a piece at a time."""
    reading = Reading()
    for document in found:
        for _ in reading.document(document.pieces):
            pass
    return reading.survey()


def choose(found: Survey, share: float) -> Split:
    """Hold out about `share` of the bytes.

    Documents are taken in the order of their hashes while they fit, equal ones together. Where there are few documents,
    or each is too large, the end of the text is held out instead.
    """
    held = np.zeros(len(found.sizes), dtype=bool)
    target = round(share * found.num_bytes)
    if not target:
        return Split(held=held)
    if len(held) >= _FEW_DOCUMENTS:
        held = _by_hash(found, target)
        if found.sizes[held].sum() >= target / 2:
            return Split(held=held)
    return Split(held=np.zeros_like(held), cut_bytes=found.num_bytes - target)


def _by_hash(found: Survey, target: int) -> NDArray[np.bool_]:
    values, where = np.unique(found.hashes, return_inverse=True)
    sizes = np.bincount(where, weights=found.sizes).astype(np.int64)
    taken = np.zeros(len(values), dtype=bool)
    left, enough = target, target // 200
    for i, size in enumerate(sizes):
        if size <= left:
            taken[i] = True
            left -= int(size)
            if left <= enough:
                break
    return taken[where]


def parts(found: Iterable[Document], split: Split, reading: Reading) -> Iterator[SplitPart]:
    """Every piece with its stream, in order; `reading` counts along, to notice text that changed since the survey."""
    for document in found:
        number = reading.num_documents
        counted = reading.document(filter(None, document.pieces))
        if split.cut_bytes >= 0:
            yield from _marked(_divided(counted, split.cut_bytes, reading))
        else:
            stream = HELD_OUT if number < len(split.held) and split.held[number] else TRAIN
            yield from _marked((stream, piece) for piece in counted)


def _divided(pieces: Iterable[str], cut_bytes: int, reading: Reading) -> Iterator[tuple[int, str]]:
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
    """The line end at or before `near`; else the first one behind it; else `near` itself."""
    return text.rfind("\n", 0, near) + 1 or (text.find("\n", near) + 1) % len(text) or near


def _marked(found: Iterable[tuple[int, str]]) -> Iterator[SplitPart]:
    """Each piece of a document told whether it is the first or last of its stream."""
    waiting, before = None, None
    for item in found:
        if waiting is not None:
            yield SplitPart(stream=waiting[0], first=waiting[0] != before, last=item[0] != waiting[0], text=waiting[1])
            before = waiting[0]
        waiting = item
    if waiting is not None:
        yield SplitPart(stream=waiting[0], first=waiting[0] != before, last=True, text=waiting[1])
