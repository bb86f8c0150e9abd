"""Sample rows: samples of a fine-tuning file, packed into rows of one length, as numbered sequences with their targets.

Letters: B rows, S tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from meshwright.data import packing
from meshwright.data.corpus import TokenStream
from meshwright.data.order import permute
from meshwright.data.rendering import ROLES
from meshwright.data.sample_encoder import TRAINED
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.windows import IGNORED, Sequences
from meshwright.spec import Data
from meshwright.spec.errors import DataError

_CHARACTER = 4
"""The most bytes of one, and so the most tokens that may be half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSamples:
    """What became of samples that are longer than a row, or of which a row keeps nothing to train."""

    kept: int
    overlong: int
    """Longer than a row: cut or left out, as data.overlong says."""
    left_out: int
    """Samples of the file that no row has."""
    untrained: int
    """Of those left out: samples without a trained token in their first S."""
    cut_tokens: int
    """Tokens behind the ends of rows."""


@final
class SampleRows:
    """The training order: sample row c of a run is row `permute(c mod n)` of epoch c div n, n = len(self)."""

    def __init__(
        self, stream: TokenStream, data: Data, tokenizer: Tokenizer, *, sequence: int, seed: int, shuffle: bool = True
    ) -> None:
        """DataError where data.overlong=refuse meets a sample that is longer than `sequence`, and where a shuffled
        stream has no sample."""
        assert stream.marks is not None, "samples have marks"
        self._stream, self._sequence = stream, sequence
        self._seed, self._shuffle = seed, shuffle
        ends = np.append(stream.starts[1:], len(stream.tokens)).astype(np.int64)
        self._lengths: Final = np.minimum(ends - stream.starts, sequence)
        self.fitted: Final = self._fit(ends - stream.starts, data, tokenizer)
        chosen = self._lengths[self._kept]
        pack = packing.best_fit if data.packing == "best-fit" else packing.alone
        self.packed: Final = pack(chosen, sequence)
        if shuffle and not len(self.packed):
            raise DataError(
                f"data.path={data.path}: no sample has a trained token in its first recipe.sequence={sequence} tokens"
            )

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self.packed)

    def take(self, cursor: int, count: int) -> Sequences:
        """Rows [cursor, cursor + count) of the run; depends on the arguments, the samples and the seed alone."""
        epochs, places = np.divmod(np.arange(cursor, cursor + count, dtype=np.int64), len(self))
        if self._shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                places[here] = permute(places[here], len(self), seed=self._seed, epoch=int(epoch))
        return self._gather(places)

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """All rows for evaluation, `count` at a time (fewer at the end); `limit` > 0 takes so many, spread evenly."""
        total = len(self)
        chosen = np.arange(total, dtype=np.int64)
        if 0 < limit < total:
            chosen = np.arange(limit, dtype=np.int64) * total // limit
        for first in range(0, len(chosen), count):
            yield self._gather(chosen[first : first + count])

    def samples_of(self, row: int) -> list[int]:
        """Numbers, in the file's order, of the samples of a row that is not shuffled."""
        found: list[int] = self._kept[self.packed.row(row)].tolist()
        return found

    def _fit(self, lengths: NDArray[np.int64], data: Data, tokenizer: Tokenizer) -> FittedSamples:
        """Find what is kept, and how long it is."""
        long = np.flatnonzero(lengths > self._sequence)
        if len(long) and data.overlong == "refuse":
            raise DataError(
                f"data.path={data.path}: {len(long):,} of {len(lengths):,} samples are longer than "
                f"recipe.sequence={self._sequence} tokens, the longest {lengths.max():,}: take a longer sequence, or "
                "data.overlong=truncate or drop"
            )
        for sample in long.tolist():
            self._lengths[sample] = self._whole_characters(sample, tokenizer)
        trains = np.array([self._trains(sample) for sample in range(len(lengths))], dtype=bool)
        stays = trains & (lengths <= self._sequence) if data.overlong == "drop" else trains
        self._kept = np.flatnonzero(stays)
        cut = lengths[stays] - self._lengths[stays]
        return FittedSamples(
            kept=len(self._kept), overlong=len(long), left_out=int((~stays).sum()), untrained=int((~trains).sum()),
            cut_tokens=int(cut.sum()),
        )  # fmt: skip

    def _whole_characters(self, sample: int, tokenizer: Tokenizer) -> int:
        """The length of a sample that is cut, so that its last token does not end in the middle of a character."""
        begin = int(self._stream.starts[sample])
        for length in range(self._sequence, 0, -1):
            near = self._stream.read(begin + max(0, length - _CHARACTER), begin + length)
            if _ends_whole(near, tokenizer):
                return length
        return 0

    def _trains(self, sample: int) -> bool:
        """Whether any token but the first, which nothing predicts, is trained."""
        assert self._stream.marks is not None, "samples have marks"
        begin = int(self._stream.starts[sample])
        return bool((self._stream.marks[begin + 1 : begin + self._lengths[sample]] & TRAINED).any())

    def _gather(self, places: NDArray[np.int64]) -> Sequences:
        """These rows; what no sample fills is a document of its own without targets."""
        shape = (len(places), self._sequence)
        tokens, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        documents, positions = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        roles = np.zeros(shape, dtype=np.uint8)
        for row, place in enumerate(places.tolist()):
            self._fill(self.packed.row(place), tokens[row], targets[row], documents[row], positions[row], roles[row])
        return Sequences(
            tokens=tokens, targets=targets, documents=documents, positions=positions, roles=roles,
            packed=bool((documents[:, -1] > 0).any()),
        )  # fmt: skip

    def _fill(
        self, samples: NDArray[np.int64], tokens: NDArray[np.int64], targets: NDArray[np.int64],
        documents: NDArray[np.int32], positions: NDArray[np.int32], roles: NDArray[np.uint8],
    ) -> None:  # fmt: skip
        assert self._stream.marks is not None, "samples have marks"
        place, number = 0, 0
        for number, sample in enumerate(self._kept[samples].tolist(), start=1):
            begin, length = int(self._stream.starts[sample]), int(self._lengths[sample])
            here, ids = slice(place, place + length), self._stream.read(begin, begin + length)
            marks = self._stream.marks[begin + 1 : begin + length]
            trained = marks & TRAINED > 0
            tokens[here], documents[here], positions[here] = ids, number - 1, np.arange(length)
            targets[place : place + length - 1] = np.where(trained, ids[1:].astype(np.int64), IGNORED)
            roles[place : place + length - 1] = marks & ~np.uint8(TRAINED)
            place += length
        documents[place:], positions[place:] = number, np.arange(len(tokens) - place)


def trained_roles(stream: TokenStream) -> tuple[str, ...]:
    """Who says what is trained, `other` among them: of text nobody."""
    if stream.marks is None:
        return ()
    found = np.unique(stream.marks[stream.marks & TRAINED > 0] & ~np.uint8(TRAINED))
    return tuple(ROLES[number] for number in found.tolist())


def _ends_whole(tokens: NDArray[Any], tokenizer: Tokenizer) -> bool:
    """Whether these tokens end with a whole character. Bytes that are none decode to U+FFFD, by some tokenizers a whole
    run of bytes where one is missing: hence ends of every length. A U+FFFD of the text itself counts as half."""
    ends = (tokens[first:] for first in range(len(tokens)))
    return any(not tokenizer.decode(end).endswith("\ufffd") for end in ends)
