"""What layouts share is counted once (planner/step/shared_costs.py): no answer may depend on what was asked before."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.step.predict import estimator, predict
from meshwright.spec import Layout, Plan, Recipe, presets

LLAMA, MOE, DEEPSEEK = (presets.model(name) for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"))
RANKS, RING = Layout(dp_shard=16, micro_batch=1), Layout(dp_shard=8, cp=2, micro_batch=1)
V = Layout(dp_shard=8, pp=2, vp=2, ep=8, zero=1, schedule="dualpipe-v", micro_batch=1)
SMALL = replace(presets.model("moe-tiny"), max_positions=4096)
SHARED: dict[str, tuple[Any, Layout, dict[str, Any]]] = {
    "pieces of experts": (MOE, V, {"schedule": "interleaved"}),
    "a ring": (LLAMA, RING, {"context": "all-gather"}),
    "how positions are cut": (LLAMA, RING, {"context_split": "chunks"}),
    "kernels that keep no norms": (DEEPSEEK, RANKS, {"kernels": "reference"}),
    "graphs": (SMALL, replace(RANKS, dp_shard=1, dp_replicate=16, compile="off"), {"cuda_graphs": "on"}),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_prediction_does_not_depend_on_what_was_predicted_before(name: str) -> None:
    model, layout, change = SHARED[name]
    recipe = Recipe(sequence=4096, global_batch=64, precision="bf16")
    plan = Plan(model=model, recipe=recipe, layout=layout, cluster=presets.cluster("h100x8", nodes=2))
    other = replace(plan, layout=replace(layout, **change))
    assert not plan.violations() and not other.violations()
    fresh = predict(plan)
    shared = estimator(plan)
    shared.predict(other)
    found = shared.predict(plan)
    assert (found.step_s, found.peak_bytes) == (fresh.step_s, fresh.peak_bytes)
