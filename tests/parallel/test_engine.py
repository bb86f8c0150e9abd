"""Layouts on real Gloo processes beside one device: loss, every gradient, gradient norm and weights after two steps."""

from functools import cache
from typing import Any

import pytest

from meshwright.observe.verify import Case, Outcome, first_difference, outcome
from meshwright.spec import Layout, ModelShape
from tests.parallel.processes import on_ranks

LLAMA = ModelShape(vocab=131, layers=3, hidden=32, heads=4, kv_heads=2, ffn=44, max_positions=64)
CASES = {
    "llama": Case(shape=LLAMA),
    "packed": Case(shape=LLAMA, packed=True),
}


@cache
def one_device(case: str) -> Outcome:
    return outcome(CASES[case], Layout(compile="off"))


def _run(case: str, options: list[dict[str, Any]]) -> list[Outcome]:
    return [outcome(CASES[case], Layout(compile="off", **each)) for each in options]


DATA = [
    *({"dp_shard": 2, "zero": zero, "micro_batch": 2} for zero in range(4)),
    {"dp_replicate": 2},
    {"dp_shard": 2, "zero": 3, "recompute": "full", "micro_batch": 2},
    {"dp_shard": 2, "zero": 2, "recompute": "selective"},
]
TENSOR = [{"tp": 2}, {"tp": 2, "sp": True}, {"tp": 2, "sp": True, "recompute": "selective", "micro_batch": 4}]
FOUR = [
    {"tp": 4},
    {"tp": 4, "sp": True},
    {"tp": 2, "dp_shard": 2, "zero": 3},
    {"tp": 2, "dp_replicate": 2, "sp": True, "micro_batch": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "micro_batch": 1},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 1, "micro_batch": 1},
]


@pytest.mark.parametrize("case", ["llama", "packed"])
@pytest.mark.parametrize("world,layouts", [(2, DATA), (2, TENSOR), (4, FOUR)], ids=["data", "tensor", "four"])
def test_layouts_train_the_same_model(case: str, world: int, layouts: list[dict[str, Any]]) -> None:
    ranks = on_ranks(world, _run, case, layouts)
    for index, options in enumerate(layouts):
        assert first_difference(one_device(case), [rank[index] for rank in ranks]) is None, options
