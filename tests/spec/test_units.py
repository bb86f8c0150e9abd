"""How numbers are printed."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.units import GIB, MIB, count, duration, gib


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.0 MiB"), (1.5 * MIB, "1.5 MiB"), (GIB, "1.00 GiB"), (80 * GIB, "80.00 GiB"), (-2 * GIB, "-2.00 GiB")],
)
def test_memory(num_bytes: float, text: str) -> None:
    assert gib(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1K"),
        (999_400, "999K"),
        (999_600, "1M"),
        (8_030_261_248, "8.03B"),
        (671_026_404_352, "671B"),
        (14.8e12, "14.8T"),
        (2.5e15, "2500T"),
        (-1500, "-1.5K"),
        (0.123, "0.123"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_counts(number: float, text: str) -> None:
    assert count(number) == text


@given(st.integers(1, 10**15))
def test_a_count_is_right_to_three_digits(number: int) -> None:
    text = count(number)
    sizes = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    match = re.fullmatch(r"([0-9.]+)([KMBT]?)", text)
    assert match is not None, text
    assert abs(float(match[1]) * sizes[match[2]] / number - 1) <= 0.005
    assert float(match[1]) < 1000 or match[2] == "T"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.0042, "4.2 ms"),
        (0.4, "0.4 s"),
        (9.96, "10 s"),
        (59.7, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7445, "2 h 04 min"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
        (float("inf"), "unknown"),
        (float("nan"), "unknown"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e9))
def test_a_duration_is_one_short_phrase(seconds: float) -> None:
    assert re.fullmatch(r"\d+(\.\d)? m?s|\d+ min \d\d s|\d+ h \d\d min|\d+ d \d+ h", duration(seconds))
