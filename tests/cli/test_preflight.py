"""What is said before the first step."""

from dataclasses import replace

import pytest

from meshwright.api import preflight
from meshwright.planfile import read
from meshwright.planner.step.predict import estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec import Plan

PLAN = read(
    None,
    ["model=llama-3.1-8b", "cluster=h100x8", "recipe.sequence=8192", "recipe.global_batch=16", "recipe.precision=bf16",
     "layout.dp_shard=8", "layout.zero=3", "layout.micro_batch=1"],
)  # fmt: skip


def predicted(plan: Plan) -> Prediction:
    return estimator(plan).predict(plan)


def test_a_default_that_costs_speed_is_named_as_long_as_the_planner_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = predicted(PLAN)
    together = replace(PLAN, recipe=replace(PLAN.recipe, document_mask=False))
    share = 1 - predicted(together).step_s / apart.step_s
    assert bool(preflight._costs(apart)) == (share >= preflight.NAMED_FROM)
    monkeypatch.setattr(preflight, "NAMED_FROM", -1.0)
    [said] = preflight._costs(apart)
    assert said.startswith(
        f"recipe.document_mask keeps packed documents apart and costs {share:.0%} of the planned speed"
    )
    assert preflight._costs(predicted(together)) == [], "nobody pays"
    assert preflight._costs(predicted(replace(PLAN, cluster=read(None).cluster))) == [], (
        "nothing is known of the device"
    )
