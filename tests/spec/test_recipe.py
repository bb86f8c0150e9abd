"""Recipe: bounds, the warm-up that fits, the batch ramp."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.spec import BatchStage, Recipe
from meshwright.spec.errors import PlanError


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (9, 0), (60, 6), (200, 20), (2000, 20), (100_000, 1000), (1_000_000, 2000)]
)
def test_warm_up_fits_the_run_by_itself(steps: int, warmup: int) -> None:
    assert Recipe(steps=steps).rising_steps == warmup
    assert Recipe(steps=steps, warmup_steps=0).rising_steps == 0


@pytest.mark.parametrize("field", ["steps", "sequence", "global_batch", "keep_last", "log_every"])
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_counts_are_at_least_one(field: str, value: int) -> None:
    with pytest.raises(PlanError, match=rf"recipe\.{field}={value} must be at least 1"):
        Recipe(**{field: value})


@pytest.mark.parametrize(
    "field", ["warmup_steps", "decay_steps", "noise_scale_every", "eval_every", "eval_sequences", "checkpoint_every"]
)
def test_counts_are_not_negative(field: str) -> None:
    with pytest.raises(PlanError, match=rf"recipe\.{field}=-2 must be 0 or more"):
        Recipe(**{field: -2})


@pytest.mark.parametrize("field", ["learning_rate", "min_learning_rate_ratio", "weight_decay", "clip", "balance_loss"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_rates_are_numbers_of_zero_or_more(field: str, value: float) -> None:
    with pytest.raises(PlanError, match=rf"recipe\.{field}="):
        Recipe(**{field: value})


@pytest.mark.parametrize("field", ["beta1", "beta2", "dropout"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_shares_lie_below_one(field: str, value: float) -> None:
    with pytest.raises(PlanError, match=rf"recipe\.{field}=.* must lie in \[0, 1\)"):
        Recipe(**{field: value})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"epsilon": 0.0}, "recipe.epsilon=0.0 must be above 0"),
        ({"epsilon": float("nan")}, "recipe.epsilon=nan"),
        ({"seed": -1}, "recipe.seed=-1"),
        ({"seed": 2**63}, "recipe.seed="),
        ({"skip_spikes": 1.0}, "recipe.skip_spikes=1.0 must be above 1 (times the mean norm), or 0 for none"),
        ({"skip_spikes": float("nan")}, "recipe.skip_spikes=nan must be above 1"),
        ({"skip_nonfinite": -1}, "recipe.skip_nonfinite=-1 must be 0 or more"),
        ({"min_learning_rate_ratio": 1.5}, "is a share of learning_rate"),
        ({"steps": 100, "warmup_steps": 101}, "exceeds recipe.steps=100: take recipe.warmup_steps=10"),
    ],
)
def test_recipes_that_cannot_be(changes: dict[str, float], says: str) -> None:
    with pytest.raises(PlanError) as error:
        Recipe(**changes)  # type: ignore[arg-type]
    assert says in str(error.value)


def test_batch_ramp() -> None:
    stages = (BatchStage(tokens=100, global_batch=8), BatchStage(tokens=200, global_batch=64))
    recipe = Recipe(global_batch=2, batch_ramp=stages)
    assert [recipe.global_batch_at(seen) for seen in (0, 99, 100, 199, 200, 10**9)] == [2, 2, 8, 8, 64, 64]


def test_batch_ramps_that_cannot_be() -> None:
    with pytest.raises(PlanError, match=r"tokens must rise from stage to stage, not \[5, 5\]"):
        Recipe(batch_ramp=(BatchStage(tokens=5, global_batch=1), BatchStage(tokens=5, global_batch=2)))
    with pytest.raises(PlanError, match="tokens=-1"):
        BatchStage(tokens=-1, global_batch=1)
    with pytest.raises(PlanError, match="global_batch=0"):
        BatchStage(tokens=1, global_batch=0)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 4000), sequence=st.integers(1, 9), batch=st.integers(1, 9),
    borders=st.lists(st.integers(1, 3000), max_size=3, unique=True), data=st.data(),
)  # fmt: skip
def test_a_budget_of_tokens_is_the_fewest_steps_that_read_them(
    tokens: int, sequence: int, batch: int, borders: list[int], data: st.DataObject
) -> None:
    """Counted step by step, the batch ramp included."""
    ramp = tuple(BatchStage(tokens=at, global_batch=data.draw(st.integers(1, 9))) for at in sorted(borders))
    recipe = Recipe(tokens=tokens, sequence=sequence, global_batch=batch, batch_ramp=ramp).over()
    seen, steps = 0, 0
    while seen < tokens:
        seen, steps = seen + recipe.global_batch_at(seen) * sequence, steps + 1
    assert recipe.steps == steps and recipe.rising_steps == Recipe(steps=steps).rising_steps
    assert recipe.over() == recipe


def test_a_run_has_one_length() -> None:
    with pytest.raises(PlanError, match=r"recipe.epochs=3 and recipe.tokens=5: give one of them"):
        Recipe(epochs=3, tokens=5)
    with pytest.raises(PlanError, match=r"recipe.warmup_steps=30 exceeds the 1 steps of recipe.tokens=5: take"):
        Recipe(tokens=5, warmup_steps=30).over()
