"""The shuffle is one-to-one, depends on (seed, epoch) alone and never changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.sequences.windows import permute

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 10**6)


def item_at(index: int, size: int, *, seed: int, epoch: int) -> int:
    return int(permute(np.array([index]), size, seed=seed, epoch=epoch)[0])


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), seed=SEEDS, epoch=EPOCHS)
def test_every_place_is_taken_once(size: int, seed: int, epoch: int) -> None:
    shuffled = permute(np.arange(size), size, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(shuffled), np.arange(size))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 2**62), SEEDS, EPOCHS)
def test_one_place_is_found_as_among_many(data: st.DataObject, size: int, seed: int, epoch: int) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    many = permute(np.array(indices), size, seed=seed, epoch=epoch)
    assert many.tolist() == [item_at(index, size, seed=seed, epoch=epoch) for index in indices]
    assert all(0 <= index < size for index in many.tolist())
    assert len(set(many.tolist())) == len(set(indices))


def test_golden_values() -> None:
    """A run that is resumed with another version must read on in the same order."""
    assert [item_at(i, 10, seed=0, epoch=0) for i in range(10)] == [6, 0, 5, 7, 1, 3, 2, 9, 8, 4]
    assert [item_at(i, 10, seed=0, epoch=1) for i in range(10)] == [6, 4, 9, 3, 5, 1, 8, 0, 7, 2]
    far = [item_at(i, 10**12, seed=2**63 - 1, epoch=7) for i in (0, 1, 10**12 - 1)]
    assert far == [627061810016, 107965986553, 511360793463]
    assert item_at(12345, 2**61, seed=1, epoch=2) == 1326014985967397053
    assert item_at(0, 1, seed=5, epoch=9) == 0


def test_all_orders_of_four_come_alike() -> None:
    """24 orders over 4800 seeds: 200 each, five standard deviations are 70."""
    orders = [tuple(permute(np.arange(4), 4, seed=seed, epoch=0).tolist()) for seed in range(4800)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24
    assert min(counts) > 130 and max(counts) < 270


def test_neighbours_land_far_apart() -> None:
    size = 20000
    shuffled = permute(np.arange(size), size, seed=3, epoch=0)
    assert abs(np.corrcoef(shuffled, np.arange(size))[0, 1]) < 0.04
    assert abs(np.abs(np.diff(shuffled)).mean() / size - 1 / 3) < 0.01


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_outside_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=r"range\(10\)"):
        item_at(index, 10, seed=0, epoch=0)
