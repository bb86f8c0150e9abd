"""Windows: a token stream as numbered sequences with their targets, document numbers and positions.

Window i of length S reads tokens [i S, i S + S) and predicts [i S + 1, i S + S], so every token of the windows but the
very first is a target once. Letters: B sequences, S tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from meshwright.data.corpus import TokenStream
from meshwright.data.order import permute
from meshwright.spec.errors import DataError

IGNORED: Final = -100
"""A target that is not predicted, as torch's cross entropy has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """A batch, all arrays [B, S]."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    """The next token, or IGNORED."""
    documents: NDArray[np.int32]
    """Number of the document within the row, from 0."""
    positions: NDArray[np.int32]
    """Place of the token within its document, from 0 at the row's start."""
    packed: bool
    """Whether any row holds a document's border."""
    answers: NDArray[np.int64] | None = None
    """[B, A] of pairs: the number of the sample that each document of a row is, the better one of a pair first; in its
    stream, or among those of all sources of a mixture; -1 = none; None = there are no pairs."""
    roles: NDArray[np.uint8] | None = None
    """Who says each target, as its place in rendering.ROLES; None = text, which nobody says."""

    @property
    def document_tokens(self) -> float:
        """Tokens of the document that a token is in, on average: long ones hold more of them. What attention takes goes
        by it."""
        squares = sum(int((np.unique(row, return_counts=True)[1] ** 2).sum()) for row in self.documents)
        return squares / max(1, self.documents.size)

    def rows(self, which: slice | NDArray[np.int64]) -> "Sequences":
        """Some of the rows; `packed` stays that of all, so that those who share them go the same way."""
        return Sequences(
            tokens=self.tokens[which],
            targets=self.targets[which],
            documents=self.documents[which],
            positions=self.positions[which],
            packed=self.packed,
            answers=None if self.answers is None else self.answers[which],
            roles=None if self.roles is None else self.roles[which],
        )


class NumberedRows(Protocol):
    """Rows of tokens, each one sample of a run."""

    def __len__(self) -> int:
        """Of one epoch."""

    def take(self, cursor: int, count: int) -> Sequences:
        """Rows [cursor, cursor + count) of the run."""

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """All rows once, `count` at a time; `limit` > 0 takes so many, spread evenly."""


@final
class Sampler:
    """The training order: sample number c of a run is window `permute(c mod n)` of epoch c div n, n = len(self)."""

    def __init__(
        self, stream: TokenStream, *, sequence: int, tokenizer_separator: bool, seed: int, shuffle: bool = True
    ) -> None:
        """`tokenizer_separator`: one token begins and ends documents, and is predicted at their borders.

        DataError where the stream is shorter than one window; without `shuffle` that is an error of `take` only, for
        `windows_in_order` pads what is short.
        """
        self._stream, self._sequence, self._separator = stream, sequence, tokenizer_separator
        self._seed, self._shuffle = seed, shuffle
        if shuffle:
            self._check_length()

    def __len__(self) -> int:
        """Windows of one epoch; the tokens behind the last whole window are not in it."""
        return max(0, self._stream.num_tokens - 1) // self._sequence

    def take(self, cursor: int, count: int) -> Sequences:
        """Samples [cursor, cursor + count) of the run; depends on the arguments, the stream and the seed alone."""
        self._check_length()
        return self.rows_of(self.windows(cursor, count))

    def rows_of(self, numbers: NDArray[np.int64]) -> Sequences:
        """The windows of these numbers."""
        return _gather(self._stream, numbers * self._sequence, self._sequence, self._separator)

    def windows(self, cursor: int, count: int) -> NDArray[np.int64]:
        """Which windows these samples are, [count]."""
        epochs, places = np.divmod(np.arange(cursor, cursor + count, dtype=np.int64), len(self))
        if self._shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                places[here] = permute(places[here], len(self), seed=self._seed, epoch=int(epoch))
        return places

    def _check_length(self) -> None:
        if not len(self):
            needed, there = self._sequence + 1, self._stream.num_tokens
            raise DataError(
                f"recipe.sequence={self._sequence} needs {needed} tokens and the data has {there}: take "
                f"recipe.sequence={max(1, there - 1)} or less, or more text in data.path"
            )

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """All windows for evaluation, `count` at a time (fewer at the end): every token is scored exactly once.

        The last, short window is padded with ignored targets. `limit` > 0 takes so many windows, spread evenly. Nothing
        comes from a stream of fewer than two tokens.
        """
        total = max(0, -(-(self._stream.num_tokens - 1) // self._sequence))
        chosen = np.arange(total, dtype=np.int64)
        if 0 < limit < total:
            chosen = np.arange(limit, dtype=np.int64) * total // limit
        for first in range(0, len(chosen), count):
            windows = chosen[first : first + count]
            yield _gather(self._stream, windows * self._sequence, self._sequence, self._separator)


def _gather(stream: TokenStream, begins: NDArray[np.int64], sequence: int, separator: bool) -> Sequences:
    """The windows that begin at these tokens; one that reaches behind the stream's end is padded."""
    read, length = _read(stream, begins, sequence + 1)
    border = _borders(stream, begins, sequence + 1)
    tokens, targets = read[:, :-1], read[:, 1:].copy()
    inside = np.arange(1, sequence + 1) < length[:, None]
    targets[~inside] = IGNORED
    if not separator:
        targets[border[:, 1:]] = IGNORED
    border[np.arange(len(begins)), np.minimum(length, sequence)] |= length <= sequence  # padding is a document
    here = border[:, :-1].copy()
    here[:, 0] = False
    places = np.arange(sequence, dtype=np.int32)
    return Sequences(
        tokens=np.ascontiguousarray(tokens),
        targets=targets,
        documents=np.cumsum(here, axis=1, dtype=np.int32),
        positions=places - np.maximum.accumulate(np.where(here, places, np.int32(0)), axis=1),
        packed=bool(here.any()),
    )


def _read(stream: TokenStream, begins: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """([B, size] tokens, 0 behind the stream's end, and [B] how many are real)."""
    found = np.zeros((len(begins), size), dtype=np.int64)
    lengths = np.minimum(size, stream.num_tokens - begins)
    for row, begin, length in zip(found, begins.tolist(), lengths.tolist(), strict=True):
        row[:length] = stream.read(begin, begin + length)
    return found, lengths


def _borders(stream: TokenStream, begins: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """[B, size]: where a document begins."""
    found = np.zeros((len(begins), size), dtype=bool)
    first = np.searchsorted(stream.starts, begins, side="left").tolist()
    behind = np.searchsorted(stream.starts, begins + size, side="left").tolist()
    for row, begin, low, high in zip(found, begins.tolist(), first, behind, strict=True):
        row[stream.starts[low:high] - begin] = True
    stream.release()
    return found
