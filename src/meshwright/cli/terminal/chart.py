"""A loss curve in characters: braille dots, two to a column and four to a row of text."""

import itertools
import math
from collections.abc import Sequence

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of a dot in a braille cell: column, then row from the top (Unicode block U+2800)."""
BLANK = 0x2800


class Curve:
    """Values in the order they came, in a bounded number of bins: a full store halves itself by averaging pairs."""

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.values: list[float] = []
        self._stride = 1
        self._open_sum = 0.0
        self._open_count = 0

    def add(self, value: float) -> None:
        """Take in one value; what is no number is left out."""
        if not math.isfinite(value):
            return
        self._open_sum += value
        self._open_count += 1
        if self._open_count == self._stride:
            self.values.append(self._open_sum / self._stride)
            self._open_sum, self._open_count = 0.0, 0
        if len(self.values) == self.capacity:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._stride *= 2


def span(values: Sequence[float], keep: float = 0.95) -> tuple[float, float]:
    """Lowest and highest value worth showing: the first steps' tall peak is cut off at quantile `keep`.

    A flat curve gets room on both sides, so that it is drawn in the middle.
    """
    numbers = sorted(v for v in values if math.isfinite(v))
    if not numbers:
        return 0.0, 1.0
    low, high = numbers[0], numbers[round(keep * (len(numbers) - 1))]
    room = 0.05 * (high - low) or 0.05 * abs(low) or 1.0
    return low - room, high + room


def resample(values: Sequence[float], columns: int) -> list[float]:
    """`columns` values spread over all of `values`: means where there are many, lines between where there are few."""
    if len(values) > columns:
        edges = [i * len(values) // columns for i in range(columns + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    if len(values) == 1:
        return list(values) * columns
    step = (len(values) - 1) / max(1, columns - 1)
    return [_between(values, i * step) for i in range(columns)]


def _between(values: Sequence[float], place: float) -> float:
    left = min(int(place), len(values) - 2)
    share = place - left
    return values[left] * (1 - share) + values[left + 1] * share


def braille(values: Sequence[float], width: int, height: int, low: float, high: float) -> list[str]:
    """`height` rows of `width` characters with `values` as one connected line between `low` and `high`."""
    cells = [[0] * width for _ in range(height)]
    numbers = [v for v in values if math.isfinite(v)]
    if not numbers or width < 1 or height < 1 or not high > low:
        return [chr(BLANK) * width for _ in range(height)]
    rows = [_row(value, 4 * height, low, high) for value in resample(numbers, 2 * width)]
    for x, y in enumerate(rows):
        for dot in range(*_stroke(rows[x - 1] if x else y, y)):
            cells[dot // 4][x // 2] |= DOTS[x % 2][dot % 4]
    return ["".join(chr(BLANK + bits) for bits in row) for row in cells]


def _row(value: float, dots: int, low: float, high: float) -> int:
    """Dot row from the top; what lies beyond the span stays at its edge."""
    share = (high - value) / (high - low)
    return min(dots - 1, max(0, int(share * dots)))


def _stroke(before: int, now: int) -> tuple[int, int]:
    """Rows to fill in a column so that it touches the one before it."""
    if now > before:
        return before + 1, now + 1
    if now < before:
        return now, before
    return now, now + 1
