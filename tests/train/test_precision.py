"""The loss scale of fp16, and the dtypes of a recipe."""

import pytest
import torch

from meshwright.spec import Recipe
from meshwright.train.precision import DTYPES, LossScaler

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(False), torch.tensor(True)


def test_every_precision_of_a_recipe_has_a_dtype() -> None:
    assert set(DTYPES) == set(Recipe.__dataclass_fields__["precision"].type.__args__)  # type: ignore[union-attr]


def test_an_overflow_halves_and_starts_the_count_anew() -> None:
    scaler = LossScaler(CPU, initial=1024.0, growth_interval=3)
    for overflow, scale, good in [
        (GOOD, 1024, 1),
        (GOOD, 1024, 2),
        (BAD, 512, 0),
        (BAD, 256, 0),
        (GOOD, 256, 1),
        (GOOD, 256, 2),
        (GOOD, 512, 0),
        (GOOD, 512, 1),
        (GOOD, 512, 2),
        (GOOD, 1024, 0),
    ]:
        scaler.update(overflow)
        assert (scaler.scale.item(), scaler.good_steps.item()) == (scale, good)


@pytest.mark.parametrize("interval", [1, 2000])
def test_it_grows_after_the_interval_and_not_before(interval: int) -> None:
    scaler = LossScaler(CPU, growth_interval=interval)
    for _ in range(interval - 1):
        scaler.update(GOOD)
    assert scaler.scale == 2.0**16
    scaler.update(GOOD)
    assert scaler.scale == 2.0**17


def test_the_state_is_the_tensors_in_use() -> None:
    scaler, other = LossScaler(CPU), LossScaler(CPU)
    for overflow in (BAD, GOOD, GOOD):
        scaler.update(overflow)
    for name, tensor in scaler.tensors().items():
        other.tensors()[name].copy_(tensor)
    assert (other.scale.item(), other.good_steps.item()) == (2.0**15, 2)
    other.update(BAD)
    assert scaler.scale == 2.0**15
