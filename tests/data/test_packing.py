"""Packing: best-fit decreasing as one would write it down, and no place given twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshwright.data.sequences.sample_rows import Packed, best_fit, put_alone


def naive(lengths: NDArray[np.int64], capacity: int) -> tuple[list[int], list[int]]:
    """The row of every sample, and the room left in each row: the longest first, each into the fullest row that takes
    it, of equally full ones into the one that was filled last."""
    rows, room, filled = [-1] * len(lengths), [], []
    for turn, sample in enumerate(sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))):
        fits = [row for row in range(len(room)) if room[row] >= lengths[sample]]
        if fits:
            row = min(fits, key=lambda row: (room[row], -filled[row]))
        else:
            row = len(room)
            room.append(capacity)
            filled.append(turn)
        room[row] -= int(lengths[sample])
        filled[row] = turn
        rows[sample] = row
    return rows, room


def rows_of(packed: Packed) -> list[list[int]]:
    return [packed.row(row).tolist() for row in range(len(packed))]


@st.composite
def lengths_and_capacity(draw: st.DrawFn) -> tuple[NDArray[np.int64], int]:
    capacity = draw(st.integers(1, 300))
    short = st.integers(1, max(1, capacity // 4))
    lengths = draw(st.lists(st.one_of(short, st.integers(1, capacity)), max_size=80))
    return np.array(lengths, dtype=np.int64), capacity


@settings(max_examples=200, deadline=None)
@given(case=lengths_and_capacity())
def test_rows_are_those_of_a_naive_best_fit(case: tuple[NDArray[np.int64], int]) -> None:
    lengths, capacity = case
    packed = best_fit(lengths, capacity)
    rows, room = naive(lengths, capacity)
    assert rows_of(packed) == [[s for s in range(len(lengths)) if rows[s] == row] for row in range(len(room))]
    places = capacity * len(room)
    assert packed.waste == pytest.approx(sum(room) / places if places else 0.0)


@settings(max_examples=100, deadline=None)
@given(case=lengths_and_capacity())
def test_every_sample_is_in_one_row_that_takes_it(case: tuple[NDArray[np.int64], int]) -> None:
    lengths, capacity = case
    packed = best_fit(lengths, capacity)
    assert sorted(packed.order.tolist()) == list(range(len(lengths)))
    fill = [int(lengths[row].sum()) for row in map(packed.row, range(len(packed)))]
    assert all(0 < tokens <= capacity for tokens in fill)
    assert sum(1 for tokens in fill if 2 * tokens <= capacity) <= 1, "two rows that are half empty would be one"
    assert rows_of(put_alone(lengths, capacity)) == [[sample] for sample in range(len(lengths))]


def test_a_large_set_of_real_lengths_leaves_little_empty() -> None:
    drawn = np.random.default_rng(0).lognormal(6, 1, size=20_000)
    lengths = np.clip(drawn, 1, 4096).astype(np.int64)
    packed = best_fit(lengths, 4096)
    assert packed.waste < 0.01 and len(packed) <= 1.01 * lengths.sum() / 4096


@pytest.mark.parametrize(("lengths", "sentence"), [([5, 11], "5 to 11"), ([0, 3], "0 to 3")])
def test_a_length_that_fits_no_row_is_refused(lengths: list[int], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"lengths must lie between 1 and 10, found {sentence}"):
        best_fit(np.array(lengths, dtype=np.int64), 10)
