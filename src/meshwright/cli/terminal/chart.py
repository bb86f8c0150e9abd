"""A loss curve in braille characters: two dots across and four down per character."""

import itertools
import math
from collections.abc import Sequence

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of the dots of a braille cell, by column and then by row from the top (Unicode block U+2800)."""
BLANK = 0x2800


class Curve:
    """Values in order, in a bounded number of bins. A full store halves itself by averaging pairs."""

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.values: list[float] = []
        self._stride = 1
        self._open_sum = 0.0
        self._open_count = 0

    def add(self, number: float) -> None:
        """Add a value, unless it is infinite or no number."""
        if not math.isfinite(number):
            return
        self._open_sum += number
        self._open_count += 1
        if self._open_count == self._stride:
            self.values.append(self._open_sum / self._stride)
            self._open_sum, self._open_count = 0.0, 0
        if len(self.values) == self.capacity:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._stride *= 2


def span(values: Sequence[float], keep: float = 0.95) -> tuple[float, float]:
    """Return the lowest and highest value to show. The tall peak of the first steps is cut off at quantile `keep`.

    A flat curve gets room on both sides and is drawn in the middle.
    """
    numbers = sorted(v for v in values if math.isfinite(v))
    if not numbers:
        return 0.0, 1.0
    low, high = numbers[0], numbers[round(keep * (len(numbers) - 1))]
    room = 0.05 * (high - low) or 0.05 * abs(low) or 1.0
    return low - room, high + room


def resample(values: Sequence[float], columns: int) -> list[float]:
    """Spread `values` over `columns`: means where there are many, linear interpolation where there are few."""
    if len(values) > columns:
        edges = [i * len(values) // columns for i in range(columns + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    if len(values) == 1:
        return list(values) * columns
    step = (len(values) - 1) / max(1, columns - 1)
    points = []
    for position in (i * step for i in range(columns)):
        left = min(int(position), len(values) - 2)
        share = position - left
        points.append(values[left] * (1 - share) + values[left + 1] * share)
    return points


def braille(values: Sequence[float], width: int, height: int, low: float, high: float) -> list[str]:
    """Return `height` rows of `width` characters: `values` as one connected line between `low` and `high`."""
    cells = [[0] * width for _ in range(height)]
    numbers = [v for v in values if math.isfinite(v)]
    if not numbers or width < 1 or height < 1 or not high > low:
        return [chr(BLANK) * width for _ in range(height)]
    dots, shares = 4 * height, ((high - value) / (high - low) for value in resample(numbers, 2 * width))
    rows = [min(dots - 1, max(0, int(share * dots))) for share in shares]  # from the top; beyond the span at its edge
    for x, y in enumerate(rows):
        for dot in range(*_stroke(rows[x - 1] if x else y, y)):
            cells[dot // 4][x // 2] |= DOTS[x % 2][dot % 4]
    return ["".join(chr(BLANK + bits) for bits in row) for row in cells]


def _stroke(before: int, now: int) -> tuple[int, int]:
    """Return the range of rows to fill so that a column touches the one before it."""
    if now > before:
        return before + 1, now + 1
    if now < before:
        return now, before
    return now, now + 1
