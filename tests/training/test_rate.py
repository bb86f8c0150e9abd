"""The learning rate at the corners of every schedule."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import Recipe
from meshwright.training.optimizer.optimizer import learning_rate

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def rates(**options: object) -> list[float]:
    recipe = Recipe(
        **{"learning_rate": 1.0, "min_learning_rate_ratio": 0.1, "steps": 100, "warmup_steps": 10, **options}
    )  # type: ignore[arg-type]
    return [math.nan, *(learning_rate(recipe, step) for step in range(1, recipe.steps + 1))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_a_straight_line_to_the_full_rate(schedule: str) -> None:
    curve = rates(learning_rate_schedule=schedule)
    assert curve[1:11] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(curve[1:]) == 1.0


def test_cosine() -> None:
    curve = rates(learning_rate_schedule="cosine")
    assert curve[55] == pytest.approx(0.1 + 0.9 * 0.5), "half way between warm-up and end"
    assert curve[33] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 23 / 90)))
    assert curve[100] == pytest.approx(0.1)


def test_linear() -> None:
    curve = rates(learning_rate_schedule="linear")
    assert curve[55] == pytest.approx(0.55)
    assert curve[19] == pytest.approx(1 - 0.9 * 0.1)
    assert curve[100] == pytest.approx(0.1)


def test_constant() -> None:
    assert set(rates(learning_rate_schedule="constant")[10:]) == {1.0}


def test_warm_up_stable_decay() -> None:
    curve = rates(learning_rate_schedule="wsd", decay_steps=40)
    assert set(curve[10:61]) == {1.0}
    assert curve[61] == pytest.approx(1 - 0.9 / 40)
    assert curve[80] == pytest.approx(0.55)
    assert curve[100] == pytest.approx(0.1)
    default = rates(learning_rate_schedule="wsd")
    assert set(default[10:81]) == {1.0} and default[81] < 1 and default[100] == pytest.approx(0.1)


def test_a_decay_longer_than_what_is_left_begins_after_the_warm_up() -> None:
    curve = rates(learning_rate_schedule="wsd", decay_steps=1000)
    assert curve[10] == 1.0 and curve[11] == pytest.approx(1 - 0.9 / 90) and curve[100] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warm_up_and_with_nothing_else(schedule: str) -> None:
    assert rates(learning_rate_schedule=schedule, warmup_steps=0)[1] <= 1.0
    only = rates(learning_rate_schedule=schedule, warmup_steps=100)
    assert only[1:] == pytest.approx([step / 100 for step in range(1, 101)])
    single_step = rates(learning_rate_schedule=schedule, steps=1, warmup_steps=0)
    assert single_step[1] == pytest.approx(1.0 if schedule == "constant" else 0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(
    steps=st.integers(1, 300),
    share=st.floats(0, 1),
    floor=st.floats(0, 1),
    decay=st.integers(0, 400),
)
def test_never_above_the_full_rate_never_below_the_floor_never_rising_again(
    schedule: str, steps: int, share: float, floor: float, decay: int
) -> None:
    warmup = int(share * steps)
    curve = rates(
        learning_rate_schedule=schedule,
        steps=steps,
        warmup_steps=warmup,
        min_learning_rate_ratio=floor,
        decay_steps=decay,
    )[1:]
    assert all(0 < rate <= 1 or (floor == 0 and rate >= 0) for rate in curve)
    after = curve[max(0, warmup - 1) :]
    assert all(a >= b - 1e-12 for a, b in pairwise(after))
    assert all(rate >= floor - 1e-12 for rate in after)
    if schedule != "constant" and warmup < steps:
        assert curve[-1] == pytest.approx(floor)
