"""The braille curve: bounded, connected, and robust against odd values."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.verbs.train.display import BLANK, Curve, braille, resample, span


def dots(rows: list[str]) -> set[tuple[int, int]]:
    """Return (x, y) of every dot, by the definition of the Unicode block."""
    positions = {0: (0, 0), 1: (0, 1), 2: (0, 2), 3: (1, 0), 4: (1, 1), 5: (1, 2), 6: (0, 3), 7: (1, 3)}
    drawn = set()
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            for bit, (dx, dy) in positions.items():
                if (ord(cell) - BLANK) >> bit & 1:
                    drawn.add((2 * x + dx, 4 * y + dy))
    return drawn


def test_a_falling_line_runs_from_the_top_left_to_the_bottom_right() -> None:
    drawn = dots(braille([4.0, 3.0, 2.0, 1.0], 10, 4, 1.0, 4.0))
    assert (0, 0) in drawn and (19, 15) in drawn
    assert (19, 0) not in drawn and (0, 15) not in drawn


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 40), st.integers(1, 12))
def test_every_column_is_drawn_and_touches_its_neighbour(values: list[float], width: int, height: int) -> None:
    low, high = span(values)
    rows = braille(values, width, height, low, high)
    assert [len(row) for row in rows] == [width] * height
    drawn = dots(rows)
    columns = [sorted(y for x, y in drawn if x == column) for column in range(2 * width)]
    for before, now in itertools.pairwise(columns):
        assert now[0] <= before[-1] + 1 and now[-1] >= before[0] - 1
    assert all(column == list(range(column[0], column[-1] + 1)) for column in columns)


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, math.nan]])
def test_nothing_to_draw_is_blank(values: list[float]) -> None:
    assert braille(values, 5, 2, *span(values)) == [chr(BLANK) * 5] * 2


def test_a_nan_among_numbers_is_left_out() -> None:
    assert braille([3.0, math.nan, 1.0], 8, 3, 0.0, 4.0) == braille([3.0, 1.0], 8, 3, 0.0, 4.0)


@pytest.mark.parametrize("values", [[2.5], [2.5] * 50, [0.0, 0.0]])
def test_one_value_or_a_constant_is_a_line_in_the_middle(values: list[float]) -> None:
    drawn = dots(braille(values, 6, 3, *span(values)))
    assert {x for x, _ in drawn} == set(range(12))
    assert {y for _, y in drawn} == {6}


def test_span_cuts_off_the_tall_start() -> None:
    low, high = span([10.0] + [2.0 + i / 100 for i in range(99)])
    assert 1.5 < low < 2.0 and 2.9 < high < 3.5


def test_a_value_beyond_the_span_stays_at_the_edge() -> None:
    assert (0, 0) in dots(braille([100.0, 1.0], 4, 2, 0.0, 2.0))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200), st.integers(1, 64))
def test_resampling_keeps_the_range(values: list[float], columns: int) -> None:
    resampled = resample(values, columns)
    assert len(resampled) == columns
    assert min(values) - 1e-9 <= min(resampled) and max(resampled) <= max(values) + 1e-9


def test_a_long_curve_stays_within_its_capacity_and_keeps_its_shape() -> None:
    curve = Curve(capacity=64)
    for i in range(10_000):
        curve.add(float(i))
        curve.add(math.nan)
    assert 32 <= len(curve.values) < 64
    assert curve.values == sorted(curve.values)
    assert curve.values[0] < 400 and curve.values[-1] > 9_000
