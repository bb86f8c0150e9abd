"""Windows: a token stream as numbered sequences with their targets, document numbers and positions.

Window i of length S reads tokens [i S, i S + S) and predicts [i S + 1, i S + S]. Every token of the windows except the
very first is a target once. Letters: B sequences, S tokens.

Windows are read in an order that is a shuffle without memory: it gives the number at any index. A Feistel network is a
bijection on the numbers of 2h bits, whatever its round function. Walking its cycle until the number falls below `size`
makes it a bijection on range(size) (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Reproducing a run
depends on the order: it must never change, on any machine, in any version (tests hold golden values).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from meshwright.data.corpus.corpus import TokenStream
from meshwright.spec.errors import DataError

_ROUNDS = 8


def permute(indices: NDArray[np.integer], size: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return items `indices`, [N] of int64, of the shuffle of range(size). Raises ValueError outside that range."""
    values = np.asarray(indices).astype(np.int64)
    if values.size and (values.min() < 0 or values.max() >= size):
        raise ValueError(f"indices must lie in range({size}), found {values.min()} to {values.max()}")
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    images = _feistel(values.astype(np.uint64), half, keys)
    while (outside := images >= np.uint64(size)).any():
        images[outside] = _feistel(images[outside], half, keys)
    return images.astype(np.int64)


def shuffle_rows(cursor: int, count: int, size: int, seed: int | None) -> NDArray[np.int64]:
    """Return items [cursor, cursor + count) of endless epochs of range(size), each shuffled anew. None = in order."""
    epochs, numbers = np.divmod(np.arange(cursor, cursor + count, dtype=np.int64), size)
    if seed is not None:
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            numbers[in_epoch] = permute(numbers[in_epoch], size, seed=seed, epoch=int(epoch))
    return numbers


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    digest = hashlib.blake2b(f"order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(np.uint64(key) for key in np.frombuffer(digest, dtype="<u8"))


def _feistel(values: NDArray[np.uint64], half: int, keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << bits | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014). Products wrap at 2**64."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


IGNORED: Final = -100
"""Target that is not predicted, as in torch's cross entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """A batch. Arrays are [B, S]."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    """Next token, or IGNORED."""
    documents: NDArray[np.int32]
    """Number of the document within the row, from 0."""
    positions: NDArray[np.int32]
    """Position of the token within its document, from 0 at the row's start."""
    packed: bool
    """Some row contains a document's border."""
    answers: NDArray[np.int64] | None = None
    """[B, A] for pairs, the sample number of each document of a row, the better one of a pair first. Numbers count over
    all sources of a mixture. -1 = none. None = there are no pairs."""
    roles: NDArray[np.uint8] | None = None
    """Role of each target, as its index in rendering.ROLES. None = text without roles."""

    @property
    def document_tokens(self) -> float:
        """Average length of a token's document, which decides the cost of attention. Long ones hold more tokens."""
        squares = sum(int((np.unique(row, return_counts=True)[1] ** 2).sum()) for row in self.documents)
        return squares / max(1, self.documents.size)

    def rows(self, which: slice | NDArray[np.int64]) -> "Sequences":
        """Return these rows. `packed` stays that of all, so ranks that share them act alike."""
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
        """Rows of one epoch."""

    def take(self, cursor: int, count: int) -> Sequences:
        """Return rows [cursor, cursor + count) of the run."""

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """Yield all rows once, `count` at a time, or `limit` > 0 of them, spread evenly."""


@final
class Sampler:
    """Training order: sample number c of a run is window `permute(c mod n)` of epoch c div n, n = len(self)."""

    def __init__(
        self, stream: TokenStream, *, sequence: int, tokenizer_separator: bool, seed: int, shuffle: bool = True
    ) -> None:
        """Take a stream. `tokenizer_separator`: one token begins and ends documents, and is predicted at their borders.

        Raises DataError when the stream is shorter than one window. Without `shuffle` only `take` raises it, because
        `windows_in_order` pads a short window.
        """
        self._stream, self._sequence, self._separator = stream, sequence, tokenizer_separator
        self._seed, self._shuffle = seed, shuffle
        if shuffle:
            self._check_length()

    def __len__(self) -> int:
        """Windows of one epoch, without the tokens behind the last whole window."""
        return max(0, self._stream.num_tokens - 1) // self._sequence

    def take(self, cursor: int, count: int) -> Sequences:
        """Return samples [cursor, cursor + count) of the run. They depend on the arguments, stream and seed alone."""
        self._check_length()
        return self.rows_of(self.windows(cursor, count))

    def rows_of(self, numbers: NDArray[np.int64]) -> Sequences:
        """Return the windows of these numbers."""
        return gather(self._stream, numbers * self._sequence, self._sequence, self._separator)

    def windows(self, cursor: int, count: int) -> NDArray[np.int64]:
        """Return the numbers of the windows of these samples, [count]."""
        return shuffle_rows(cursor, count, len(self), self._seed if self._shuffle else None)

    def _check_length(self) -> None:
        if not len(self):
            needed, there = self._sequence + 1, self._stream.num_tokens
            raise DataError(
                f"recipe.sequence={self._sequence} needs {needed} tokens and the data has {there}: take "
                f"recipe.sequence={max(1, there - 1)} or less, or more text in data.path"
            )

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """Yield all windows for evaluation, `count` at a time (fewer at the end): every token is scored exactly once.

        The last, short window is padded with ignored targets. `limit` > 0 takes this many windows, spread evenly. A
        stream of fewer than two tokens gives nothing.
        """
        total = max(0, -(-(self._stream.num_tokens - 1) // self._sequence))
        chosen = np.arange(total, dtype=np.int64)
        if 0 < limit < total:
            chosen = np.arange(limit, dtype=np.int64) * total // limit
        for first in range(0, len(chosen), count):
            windows = chosen[first : first + count]
            yield gather(self._stream, windows * self._sequence, self._sequence, self._separator)


def gather(stream: TokenStream, begins: NDArray[np.int64], sequence: int, separator: bool) -> Sequences:
    """Return the windows that begin at these tokens, padded behind the stream's end."""
    read, length = _read(stream, begins, sequence + 1)
    border = _borders(stream, begins, sequence + 1)
    tokens, targets = read[:, :-1], read[:, 1:].copy()
    inside = np.arange(1, sequence + 1) < length[:, None]
    targets[~inside] = IGNORED
    if not separator:
        targets[border[:, 1:]] = IGNORED
    border[np.arange(len(begins)), np.minimum(length, sequence)] |= length <= sequence  # padding is a document
    begins_inside = border[:, :-1].copy()
    begins_inside[:, 0] = False  # every row counts its documents from 0
    places = np.arange(sequence, dtype=np.int32)
    return Sequences(
        tokens=np.ascontiguousarray(tokens),
        targets=targets,
        documents=np.cumsum(begins_inside, axis=1, dtype=np.int32),
        positions=places - np.maximum.accumulate(np.where(begins_inside, places, np.int32(0)), axis=1),
        packed=bool(begins_inside.any()),
    )


def _read(stream: TokenStream, begins: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [B, size] tokens, 0 behind the stream's end, and [B] numbers of real ones."""
    tokens = np.zeros((len(begins), size), dtype=np.int64)
    lengths = np.minimum(size, stream.num_tokens - begins)
    for row, begin, length in zip(tokens, begins.tolist(), lengths.tolist(), strict=True):
        row[:length] = stream.read(begin, begin + length)
    return tokens, lengths


def _borders(stream: TokenStream, begins: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """Return [B, size] flags of the first tokens of documents."""
    borders = np.zeros((len(begins), size), dtype=bool)
    first = np.searchsorted(stream.starts, begins, side="left").tolist()
    behind = np.searchsorted(stream.starts, begins + size, side="left").tolist()
    for row, begin, low, high in zip(borders, begins.tolist(), first, behind, strict=True):
        row[stream.starts[low:high] - begin] = True
    stream.release()
    return borders
