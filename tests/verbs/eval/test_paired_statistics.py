"""Standard errors against written-out formulas and simulation; verdicts that err as often as they say."""

import math

import numpy as np
import pytest

from meshwright.verbs.eval.paired_statistics import Aggregate, Estimate, critical, difference, estimate, verdict

MEAN, RATIO = Aggregate(kind="mean"), Aggregate(kind="ratio")


def test_the_error_of_a_mean_is_the_textbooks() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    estimated = estimate(values, MEAN)
    share = sum(values) / len(values)
    assert estimated.value == share
    assert estimated.error == pytest.approx(math.sqrt(share * (1 - share) / (len(values) - 1)))
    assert estimate([1.0], MEAN).error is None


def test_a_difference_is_paired() -> None:
    """What makes an item hard for both models is no noise of their difference."""
    random = np.random.default_rng(1)
    hard = random.normal(size=400) * 5
    before, after = hard + random.normal(size=400) * 0.1, hard + 0.05 + random.normal(size=400) * 0.1
    change = difference(before.tolist(), after.tolist(), MEAN)
    changes = after - before
    assert change.value == pytest.approx(changes.mean())
    assert change.error == pytest.approx(changes.std(ddof=1) / 20)
    alone = [estimate(values.tolist(), MEAN).error for values in (before, after)]
    assert change.error is not None and change.error * 20 < min(error or 0 for error in alone)
    assert verdict(change, 400, True) == "better" and verdict(change, 400, False) == "worse"


def test_the_error_of_a_ratio_is_that_of_many_drawings() -> None:
    """Rows of very different lengths: nats per token."""
    random = np.random.default_rng(2)

    def rows(number: int) -> list[tuple[float, float]]:
        weights = random.integers(1, 60, size=number)
        losses = 2.0 + random.normal(size=number) * 0.7  # what a row is like
        return [(float(loss * weight), float(weight)) for loss, weight in zip(losses, weights, strict=True)]

    drawn = [estimate(rows(150), RATIO) for _ in range(600)]
    spread = np.std([sample.value for sample in drawn], ddof=1)
    assert np.mean([sample.error for sample in drawn]) == pytest.approx(spread, rel=0.08)


def test_another_figure_has_a_bootstraps_error() -> None:
    """A mean, said to be unknown, has the mean's error; and the same one each time."""
    values = np.random.default_rng(3).normal(size=200).tolist()
    plain = Aggregate(kind="other", combine=lambda numbers: sum(numbers) / len(numbers))
    assert estimate(values, plain) == estimate(values, plain)
    assert estimate(values, plain).error == pytest.approx(estimate(values, MEAN).error, rel=0.1)
    after = [value + 0.3 for value in values]
    change = difference(values, after, plain)
    assert change.value == pytest.approx(0.3) and change.error == pytest.approx(0, abs=1e-12)
    texts = [("a", "b"), ("c", "c")] * 5
    same = Aggregate(kind="other", combine=lambda numbers: sum(a == b for a, b in numbers) / len(numbers))
    assert 0.05 < (estimate(texts, same).error or 0) < 0.3


@pytest.mark.parametrize(("freedom", "right"), [(4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)])
def test_critical_values_are_those_of_tables(freedom: int, right: float) -> None:
    assert critical(freedom) == pytest.approx(right, rel=3e-3)


@pytest.mark.parametrize("items", [6, 20, 200])
def test_models_that_are_alike_are_told_apart_once_in_twenty_times(items: int) -> None:
    random = np.random.default_rng(4)
    told = 0
    for _ in range(2000):
        before, after = random.normal(size=(2, items)).tolist()
        told += verdict(difference(before, after, MEAN), items, True) != "within noise"
    assert 0.03 < told / 2000 < 0.07


def test_nothing_is_said_of_too_few_items() -> None:
    far = Estimate(value=1.0, error=0.01)
    assert verdict(far, 4, True) == "too few items" and verdict(far, 5, True) == "better"
    assert verdict(Estimate(value=1.0, error=None), 9, True) == "too few items"
    assert verdict(far, 9, None) == "changed"
    assert verdict(Estimate(value=0.0, error=0.0), 9, True) == "within noise"
