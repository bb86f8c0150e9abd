"""Modules that predict further tokens: parameters as published, time and memory of the last pipeline stage alone."""

from dataclasses import replace

import pytest

from meshwright.planner.cost.states import counts
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.time.collectives import StageContents, sharing
from meshwright.spec import Layout, Plan, Recipe, num_parameters, presets
from meshwright.spec.errors import PlanError
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.model.unbuilt_parts import UnbuiltParts
from meshwright.spec.weights.inventory import token_flop
from meshwright.verbs.explore import answer as exploring

V3 = presets.model("deepseek-v3")
WITH = replace(V3, unbuilt=UnbuiltParts(predicts=1))
LAYOUT = Layout(pp=16, dp_shard=64, ep=64, zero=1, micro_batch=1)


def _estimator(shape: ModelShape) -> Estimator:
    recipe = Recipe(sequence=4096, global_batch=64 * 32, precision="bf16")
    return build_estimator(
        Plan(model=shape, recipe=recipe, layout=LAYOUT, cluster=presets.cluster("h800x8", nodes=128))
    )


def test_deepseeks_module_has_the_published_size() -> None:
    """README_WEIGHTS.md of DeepSeek-V3: 11.5B beside the embedding and the head, which are shared."""
    assert (num_parameters(WITH) - num_parameters(V3)) / 1e9 == pytest.approx(11.5, abs=0.15)


def test_it_is_work_of_the_last_stage_and_of_no_other() -> None:
    plain, more = _estimator(V3), _estimator(WITH)
    *others, last = plain.costs.stages(LAYOUT, plain.costs.pass_terms(LAYOUT))
    *same, longer = more.costs.stages(LAYOUT, more.costs.pass_terms(LAYOUT))
    assert same == others
    _, costs = plain.costs.parts(LAYOUT)
    block_s, head_s = costs.routed.forward_s, costs.head.forward_s
    assert block_s + head_s < longer.forward_s - last.forward_s < 1.05 * (block_s + head_s)
    assert longer.kept_bytes - last.kept_bytes >= costs.routed.kept_bytes


def test_the_rank_of_the_last_stage_holds_it() -> None:
    ranks = range(16)
    plain, more = ([first.costs.held(LAYOUT, rank) for rank in ranks] for first in (_estimator(V3), _estimator(WITH)))
    assert more[:-1] == plain[:-1]
    first, two = (counts(shape, Layout(), range(61), first=True, last=True).whole for shape in (V3, WITH))
    assert (first, two) == (num_parameters(V3), num_parameters(WITH))
    assert 0 < more[-1].whole - plain[-1].whole < num_parameters(WITH) - num_parameters(V3)


def test_its_gradients_are_summed_too() -> None:
    held = StageContents((60,), False, True)
    links = _estimator(V3).links
    took = [sharing(shape, LAYOUT, held, links, 2.0, 4.0, False).reduce_s for shape in (V3, WITH)]
    assert took[1] > 1.2 * took[0]  # experts lie on one rank each here: nothing of theirs is summed


def test_utilization_counts_the_model_alone_and_what_does_not_run_says_so() -> None:
    assert token_flop(WITH, 4096, causal=True) == token_flop(V3, 4096, causal=True)
    assert WITH.plan_only == "plan only: the engine does not have multi-token prediction (1 further token)"
    with pytest.raises(PlanError, match=r"model.unbuilt.predicts=-1 must be at least 0"):
        UnbuiltParts(predicts=-1)
    with pytest.raises(PlanError, match="no extra blocks at the end"):
        exploring.explore(Plan(model=WITH, cluster=presets.cluster("h800x8", nodes=128)))
