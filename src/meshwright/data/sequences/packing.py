"""Packing: samples of many lengths in rows of one length, by best fit, with little left empty.

Best-fit decreasing: the longest sample first, each into the fullest row that still takes it (Johnson 1973; Ding et al.
2024, arXiv:2404.10830, "Fewer Truncations Improve Language Modeling"). Documents of a row do not see one another, so
packed and unpacked samples give the same loss and gradients.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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


def alone(lengths: NDArray[np.int64], capacity: int) -> Packed:
    """Put each sample into a row of its own."""
    return _packed(np.arange(len(lengths), dtype=np.int64), lengths, capacity)


def best_fit(lengths: NDArray[np.int64], capacity: int) -> Packed:
    """Pack lengths [samples], each from 1 to `capacity`, into rows.

    Equal lengths keep their order, and nothing else matters. Raises ValueError for a sample that fits into no row.
    """
    if len(lengths) and (lengths.max() > capacity or lengths.min() < 1):
        raise ValueError(f"lengths must lie between 1 and {capacity}, found {lengths.min()} to {lengths.max()}")
    rooms = _Rooms(capacity)
    row_of = np.empty(len(lengths), dtype=np.int64)
    for sample in np.argsort(-lengths, kind="stable").tolist():
        row_of[sample] = rooms.take(int(lengths[sample]))
    return _packed(row_of, lengths, capacity)


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
            left = room - length
            if not self._by_room[left]:
                self._set(left)
            self._by_room[left].append(row)
        return row

    def _least(self, room: int) -> int | None:
        """Return the smallest room of any row that is `room` or more."""
        for height, words in enumerate(self._levels):
            word, bit = divmod(room, 64)
            if word < len(words) and (above := words[word] >> bit):
                return self._down(height, room + (above & -above).bit_length() - 1)
            room = word + 1
        return None

    def _down(self, height: int, room: int) -> int:
        for words in reversed(self._levels[:height]):
            lowest = words[room]
            room = room * 64 + (lowest & -lowest).bit_length() - 1
        return room

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


def _packed(row_of: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int) -> Packed:
    order = np.argsort(row_of, kind="stable")
    rows = int(row_of.max()) + 1 if len(row_of) else 0
    starts = np.searchsorted(row_of[order], np.arange(rows + 1))
    waste = 1.0 - float(lengths.sum()) / (rows * capacity) if rows else 0.0
    return Packed(order=order.astype(np.int64), starts=starts.astype(np.int64), waste=waste)
