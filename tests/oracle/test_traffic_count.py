"""A fixed draw of tests.oracle.traffic; `python -m tests.oracle.traffic --number 30 --seed N` draws more."""

from dataclasses import replace

import pytest

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import Case
from tests.oracle.traffic import Drawn, differences, drawn

MQA = Case(shape=replace(shrink("qwen2.5-0.5b"), kv_heads=1))
FIXED: list[Drawn] = [
    (MQA, 2, {"tp": 2}),
    (MQA, 4, {"tp": 4, "sp": True}),
    (MQA, 4, {"tp": 2, "dp_shard": 2, "zero": 3}),
]


@pytest.mark.slow
def test_the_planner_says_what_the_process_groups_see() -> None:
    wrong = differences([*FIXED, *drawn(8, seed=13)])
    assert not wrong, "\n".join(f"{case}: {actual}" for case, actual in wrong)
