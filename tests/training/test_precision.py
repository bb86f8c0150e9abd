"""The loss scale of fp16, and the dtypes of a recipe."""

from typing import Any

import pytest
import torch

from meshwright.spec import Layout, Recipe
from meshwright.spec.memory.held import gradient_bytes
from meshwright.training.optimizer.precision import DTYPES, LossScaler, reduce_dtype

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(False), torch.tensor(True)


def test_every_precision_of_a_recipe_has_a_dtype() -> None:
    assert set(DTYPES) == set(Recipe.__dataclass_fields__["precision"].type.__args__)  # type: ignore[union-attr]


def test_gradients_are_summed_in_fp32_unless_the_recipe_says_otherwise() -> None:
    assert reduce_dtype(Recipe(precision="bf16")) == torch.float32
    assert reduce_dtype(Recipe(precision="bf16", reduce_dtype="model")) == torch.bfloat16
    assert reduce_dtype(Recipe(reduce_dtype="model")) == torch.float32


@pytest.mark.parametrize(
    ("layout", "micro_batches", "width"),
    [
        ({}, 1, 2),
        ({"tp": 2, "sp": True}, 1, 2),
        ({"tp": 4, "ep": 4}, 1, 2),
        ({"tp": 4, "ep": 2}, 1, 4),
        ({"cp": 2}, 1, 4),
        ({"dp_replicate": 2}, 1, 4),
        ({}, 2, 4),
    ],
)
def test_a_gradient_is_four_bytes_wide_where_anything_is_added(
    layout: dict[str, Any], micro_batches: int, width: int
) -> None:
    assert gradient_bytes("bf16", Layout(**layout), micro_batches=micro_batches) == width
    assert gradient_bytes("bf16", Layout(**layout), micro_batches=micro_batches, reduce_dtype="model") == 2
    assert gradient_bytes("fp32", Layout(**layout), micro_batches=micro_batches) == 4


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
