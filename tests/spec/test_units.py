"""Formats of printed numbers."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.layout.schedule import phase_words
from meshwright.spec.units import GIB, MIB, count, duration, gib, short_gib, step_time


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.000124, "0.1240 ms"),
        (0.1628, "162.8 ms"),
        (8.15, "8.150 s"),
        (21.756, "21.76 s"),
        (999.94, "999.9 s"),
        (1983.6, "1,984 s"),
        (4101.3, "4,101 s"),
        (123_456.0, "123,456 s"),
    ],
)
def test_a_step_has_four_digits(seconds: float, text: str) -> None:
    assert step_time(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(7.5 * MIB, "7.5 MiB"), (9.08 * GIB, "9.08 GiB"), (856.79 * GIB, "856.8 GiB")]
)
def test_memory_of_a_plan_has_one_decimal(num_bytes: float, text: str) -> None:
    assert short_gib(num_bytes) == text


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        ("step 2, F 0 1", "step 2, forward of stage 0, micro-batch 1"),
        ("step 1, BW 3 0", "step 1, backward of stage 3, micro-batch 0"),
        ("W 1 2", "backward for weights of stage 1, micro-batch 2"),
        ("head and loss", "head and loss"),
    ],
)
def test_passes_are_spelled_out(phase: str, text: str) -> None:
    assert phase_words(phase) == text
