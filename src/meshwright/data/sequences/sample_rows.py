"""Sample rows: samples of a fine-tuning file packed into rows of one length, as numbered sequences with their targets.

Both answers of a preference are documents of one row, so every layout has them together.

Letters: B rows, S tokens, A answers of a row, G samples that stay together: 2 of a preference, else 1.

Rows are filled by best-fit decreasing: the longest sample first, each into the fullest row that still takes it (Johnson
1973; Ding et al. 2024, arXiv:2404.10830, "Fewer Truncations Improve Language Modeling"). Documents of a row do not see
one another, so packed and unpacked samples give the same loss and gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat.encoder import TRAINED
from meshwright.data.chat.rendering import ROLES
from meshwright.data.corpus.corpus import Stream, TokenStream
from meshwright.data.sequences.windows import IGNORED, Sequences, shuffle_rows
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec import Data
from meshwright.spec.errors import DataError
from meshwright.spec.recipe.recipe import most_answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Samples assigned to rows."""

    order: NDArray[np.int64]
    """[samples] numbers of samples, row by row."""
    starts: NDArray[np.int64]
    """[rows + 1] index of the first sample of each row in `order`."""
    waste: float
    """Share of empty positions."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, number: int) -> NDArray[np.int64]:
        """Return the samples of a row."""
        return self.order[self.starts[number] : self.starts[number + 1]]


def put_alone(lengths: NDArray[np.int64], capacity: int) -> Packed:
    """Put each sample into a row of its own."""
    return _build_packed(np.arange(len(lengths), dtype=np.int64), lengths, capacity)


def best_fit(lengths: NDArray[np.int64], capacity: int) -> Packed:
    """Pack lengths [samples], each from 1 to `capacity`, into rows.

    Equal lengths keep their order, and nothing else matters. Raises ValueError for a sample that fits into no row.
    """
    if len(lengths) and (lengths.max() > capacity or lengths.min() < 1):
        raise ValueError(f"lengths must lie between 1 and {capacity}, found {lengths.min()} to {lengths.max()}")
    rooms = _Rooms(capacity)
    row_of = np.empty(len(lengths), dtype=np.int64)
    # Longest first: best-fit decreasing, whose waste is small and bounded.
    for sample in np.argsort(-lengths, kind="stable").tolist():
        row_of[sample] = rooms.take(int(lengths[sample]))
    return _build_packed(row_of, lengths, capacity)


class _Rooms:
    """Rows by remaining room. A tree of bits finds the least room that suffices."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._rows = capacity, 0
        self._by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._levels: list[list[int]] = []
        size = capacity + 1
        while not self._levels or size > 1:
            size = -(-size // 64)
            self._levels.append([0] * size)

    def take(self, length: int) -> int:
        """Return the row for a sample of this length."""
        room = self._least(length)
        if room is None:
            room, row, self._rows = self._capacity, self._rows, self._rows + 1
        else:
            row = self._by_room[room].pop()
            if not self._by_room[room]:
                self._clear(room)
        if room > length:
            rest = room - length
            if not self._by_room[rest]:
                self._set(rest)
            self._by_room[rest].append(row)
        return row

    def _least(self, room: int) -> int | None:
        """Return the smallest room of a row that is at least `room`. None = there is no such row."""
        for height, words in enumerate(self._levels):
            word, bit = divmod(room, 64)
            if word < len(words) and (above := words[word] >> bit):
                room += (above & -above).bit_length() - 1
                for below in reversed(self._levels[:height]):  # go down along the lowest bit of each word
                    room = room * 64 + (below[room] & -below[room]).bit_length() - 1
                return room
            # Nothing in the rest of this word: look for the next word with a bit, one level up.
            room = word + 1
        return None

    def _set(self, room: int) -> None:
        for words in self._levels:
            room, bit = divmod(room, 64)
            words[room] |= 1 << bit

    def _clear(self, room: int) -> None:
        for words in self._levels:
            room, bit = divmod(room, 64)
            words[room] &= ~(1 << bit)
            if words[room]:
                return


def _build_packed(row_of: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int) -> Packed:
    order = np.argsort(row_of, kind="stable")
    rows = int(row_of.max()) + 1 if len(row_of) else 0
    starts = np.searchsorted(row_of[order], np.arange(rows + 1))
    waste = 1.0 - float(lengths.sum()) / (rows * capacity) if rows else 0.0
    return Packed(order=order.astype(np.int64), starts=starts.astype(np.int64), waste=waste)


_TOKENS_AT_ONCE = 2**22
_CHARACTER = 4
"""Most bytes of a character, and so the most tokens that may be a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSamples:
    """Counts of samples (or pairs) that are longer than a row, or have nothing to train within a row."""

    retained: int
    overlong: int
    """Samples longer than a row: cut or left out by data.overlong."""
    left_out: int
    """Samples of the file that are in no row."""
    untrained: int
    """Samples among those left out without a trained token in their first S."""
    cut_tokens: int
    """Tokens behind the ends of rows."""
    trained: int
    """Tokens that an epoch trains."""


@final
class SampleRows:
    """Training order: sample row c of a run is row `permute(c mod n)` of epoch c div n, n = len(self)."""

    def __init__(
        self, stream: TokenStream, data: Data, tokenizer: Tokenizer, *, sequence: int, seed: int, shuffle: bool = True
    ) -> None:
        """Pack the samples. Raises DataError for one too long with data.overlong=refuse, and for an empty run."""
        assert stream.marks is not None, "samples have marks"
        self._stream, self._sequence = stream, sequence
        self._seed, self._shuffle = seed, shuffle
        self._together: Final = 2 if stream.pairs else 1
        # A sample ends where the next one starts.
        ends = np.append(stream.starts[1:], len(stream.tokens)).astype(np.int64)
        lengths = (ends - stream.starts).reshape(-1, self._together)
        self._lengths: Final = share_row(lengths, sequence)
        self.fitted: Final = self._fit(lengths, data, tokenizer)
        chosen = self._lengths[self._retained].sum(1)
        pack = best_fit if data.packing == "best-fit" else put_alone
        self.packed: Final = pack(chosen, sequence)
        # A training run must read something and see an answer end. An evaluation may be empty.
        if shuffle and not len(self.packed):
            raise DataError(
                f"data.path={data.path}: no sample has a trained token in its first recipe.sequence={sequence} tokens"
            )
        if shuffle and not self._has_whole_answer(lengths):
            raise DataError(
                f"data.path={data.path}: every sample is longer than recipe.sequence={sequence} and would lose "
                f"its end. Raise recipe.sequence (the longest sample has {lengths.sum(1).max():,} tokens), or "
                "give shorter samples"
            )

    @property
    def pairs(self) -> bool:
        """Samples are preferences."""
        return self._stream.pairs

    @property
    def same_pairs(self) -> int:
        """Pairs of the stream with two equal answers."""
        return self._stream.same_pairs

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self.packed)

    def take(self, cursor: int, count: int) -> Sequences:
        """Return rows [cursor, cursor + count) of the run. They depend on the arguments, samples and seed alone."""
        return self.rows_of(self.windows(cursor, count))

    def windows(self, cursor: int, count: int) -> NDArray[np.int64]:
        """Return the numbers of these rows, [count]."""
        return shuffle_rows(cursor, count, len(self), self._seed if self._shuffle else None)

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """Yield all rows for evaluation, `count` at a time, or `limit` > 0 of them, spread evenly."""
        chosen = self._chosen(limit)
        for first in range(0, len(chosen), count):
            yield self.rows_of(chosen[first : first + count])

    def _chosen(self, limit: int) -> NDArray[np.int64]:
        total = len(self)
        return np.arange(limit, dtype=np.int64) * total // limit if 0 < limit < total else np.arange(total)

    def rows_of_file(self, limit: int = 0) -> list[int]:
        """Return the row of the file of the first sample of each row of `windows_in_order`."""
        firsts = [self.samples_of(row)[0] for row in self._chosen(limit).tolist()]
        return firsts if self._stream.rows is None else self._stream.rows[firsts].tolist()

    def samples_of(self, row: int) -> list[int]:
        """Return the numbers of the samples of an unshuffled row, those of a pair side by side."""
        size = self._together
        return [
            size * group + member for group in self._retained[self.packed.row(row)].tolist() for member in range(size)
        ]

    def _fit(self, lengths: NDArray[np.int64], data: Data, tokenizer: Tokenizer) -> FittedSamples:
        """Choose the samples to retain from [N, G] lengths, and their lengths in a row."""
        whole = lengths.sum(1)
        long = np.flatnonzero(whole > self._sequence)
        if len(long) and data.overlong == "refuse":
            what = "pairs" if self._together > 1 else "samples"
            raise DataError(
                f"data.path={data.path}: {len(long):,} of {len(lengths):,} {what} are longer than "
                f"recipe.sequence={self._sequence} tokens, the longest {whole.max():,}: take a longer sequence, or "
                "data.overlong=truncate or drop"
            )
        # Rare and slow: each cut sample is decoded, so that no character is cut in two.
        for group in long.tolist():
            for member in np.flatnonzero(lengths[group] > self._lengths[group]).tolist():
                self._lengths[group, member] = self._whole_characters(group, member, tokenizer)
        trained = self._count_trained().reshape(self._lengths.shape)
        # Of a pair both answers must have something to learn.
        trains = (trained > 0).all(1)
        stays = trains & (whole <= self._sequence) if data.overlong == "drop" else trains
        self._retained = np.flatnonzero(stays)
        cut = whole[stays] - self._lengths[stays].sum(1)
        return FittedSamples(
            retained=len(self._retained), overlong=len(long), left_out=int((~stays).sum()),
            untrained=int((~trains).sum()), cut_tokens=int(cut.sum()), trained=int(trained[stays].sum()),
        )  # fmt: skip

    def _has_whole_answer(self, lengths: NDArray[np.int64]) -> bool:
        """Return whether something trained ends within a row. A text without roles has no answers."""
        assert self._stream.marks is not None, "samples have marks"
        # One sample that is not cut is enough, and usually there is one.
        if (lengths[self._retained] <= self._lengths[self._retained]).any():
            return True
        size, roles = self._together, False
        for sample in (size * group + member for group in self._retained.tolist() for member in range(size)):
            begin = int(self._stream.starts[sample])
            marks = self._stream.marks[begin : begin + int(self._lengths.flat[sample])]
            trained = marks & TRAINED > 0
            if (trained[:-1] & ~trained[1:]).any():
                return True
            roles |= bool((marks & ~np.uint8(TRAINED)).any())
        return not roles

    def _whole_characters(self, group: int, member: int, tokenizer: Tokenizer) -> int:
        """Return the length of a cut sample at which its last token does not end within a character."""
        begin = int(self._stream.starts[group * self._together + member])
        for length in range(int(self._lengths[group, member]), 0, -1):
            # A character has at most four bytes, so these tokens show whether it is complete.
            near = self._stream.read(begin + max(0, length - _CHARACTER), begin + length)
            if _ends_whole(near, tokenizer):
                return length
        return 0

    def _count_trained(self) -> NDArray[np.int64]:
        """Return [samples] trained tokens of each, without the first, which nothing predicts. Works in blocks."""
        assert self._stream.marks is not None, "samples have marks"
        lengths = self._lengths.reshape(-1)
        counts, starts, first = np.zeros(len(lengths), dtype=np.int64), self._stream.starts, 0
        while first < len(counts):
            last = max(first + 1, int(np.searchsorted(starts, starts[first] + _TOKENS_AT_ONCE)))
            offset, block = int(starts[first]), slice(first, last)
            begins = starts[block] + 1
            ends = np.maximum(begins - 1 + lengths[block], begins)
            # Counts of any span are differences of this one running sum.
            before = np.append(0, np.cumsum(self._stream.marks[offset : int(ends[-1])] & TRAINED > 0))
            counts[block] = before[ends - offset] - before[begins - offset]
            first = last
        return counts

    def rows_of(self, numbers: NDArray[np.int64]) -> Sequences:
        """Return the rows of these numbers, unshuffled. Unused positions are one more document without targets."""
        shape = (len(numbers), self._sequence)
        tokens, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        documents, positions = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        roles = np.zeros(shape, dtype=np.uint8)
        answers = np.full((len(numbers), most_answers(self._sequence)), -1, dtype=np.int64)
        for row, number in enumerate(numbers.tolist()):
            samples = self.samples_of(number)
            self._fill(samples, tokens[row], targets[row], documents[row], positions[row], roles[row])
            if self._stream.pairs:
                answers[row, : len(samples)] = np.add(samples, self._stream.first)
        return Sequences(
            tokens=tokens, targets=targets, documents=documents, positions=positions, roles=roles,
            packed=bool((documents[:, -1] > 0).any()), answers=answers if self._stream.pairs else None,
        )  # fmt: skip

    def _fill(
        self, samples: Sequence[int], tokens: NDArray[np.int64], targets: NDArray[np.int64],
        documents: NDArray[np.int32], positions: NDArray[np.int32], roles: NDArray[np.uint8],
    ) -> None:  # fmt: skip
        assert self._stream.marks is not None, "samples have marks"
        filled, number = 0, 0
        for number, sample in enumerate(samples, start=1):
            begin, length = int(self._stream.starts[sample]), int(self._lengths.flat[sample])
            span, ids = slice(filled, filled + length), self._stream.read(begin, begin + length)
            marks = self._stream.marks[begin + 1 : begin + length]
            trained = marks & TRAINED > 0
            tokens[span], documents[span], positions[span] = ids, number - 1, np.arange(length)
            targets[filled : filled + length - 1] = np.where(trained, ids[1:].astype(np.int64), IGNORED)
            roles[filled : filled + length - 1] = marks & ~np.uint8(TRAINED)
            filled += length
        # A document of its own: attention must not reach from the rest into a sample.
        documents[filled:], positions[filled:] = number, np.arange(len(tokens) - filled)


def share_row(lengths: NDArray[np.int64], sequence: int) -> NDArray[np.int64]:
    """Return the length in a row of each of [N, G] samples that share it.

    All samples stay whole if they fit. Otherwise each gets an equal part and what the other leaves.
    """
    size = lengths.shape[1]
    if size == 1:
        return np.minimum(lengths, sequence)
    room: NDArray[np.int64] = np.maximum(sequence // size, sequence - lengths[:, ::-1])
    return np.minimum(lengths, room)


def trained_roles(stream: Stream) -> tuple[str, ...]:
    """Return the roles of trained tokens, `other` included. Empty for text."""
    marks = [part.marks for part in stream.parts if part.marks is not None]
    numbers = {
        number
        for stream_marks in marks
        for number in np.unique(stream_marks[stream_marks & TRAINED > 0] & ~np.uint8(TRAINED)).tolist()
    }
    return tuple(ROLES[number] for number in sorted(numbers))


def _ends_whole(tokens: NDArray[Any], tokenizer: Tokenizer) -> bool:
    """Return whether these tokens end with a whole character.

    Incomplete bytes decode to U+FFFD, in some tokenizers together with the bytes before them, so ends of every length
    are tried. A U+FFFD of the text itself counts as incomplete.
    """
    ends = (tokens[first:] for first in range(len(tokens)))
    return any(not tokenizer.decode(end).endswith("\ufffd") for end in ends)
