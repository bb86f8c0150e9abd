"""Ranges around predictions: what a range promises, on errors that were drawn and on published rows."""

import random
from dataclasses import replace
from math import exp, inf, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.error_table import EDGE, STEPS, RowError, distributions, quantiles
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.step.predict import predict
from meshwright.planner.step.prediction import (
    POOLED_GROUP,
    fit_probability,
    memory_range,
    ranges,
    relative_range,
    row_groups,
    share_below,
)
from meshwright.spec import presets
from meshwright.spec.layout.layout import Layout
from meshwright.spec.plan.plan import Plan
from meshwright.spec.recipe.recipe import Recipe


def plan_on(device: str, nodes: int, model: str = "llama-3.1-8b") -> Plan:
    return Plan(
        model=presets.model(model),
        recipe=Recipe(sequence=8192, global_batch=64 * nodes, precision="bf16"),
        layout=Layout(dp_shard=8 * nodes, zero=3, micro_batch=1, recompute="full"),
        cluster=presets.cluster(device, nodes),
    )


def test_a_range_holds_the_prediction_and_a_rate_is_turned_round() -> None:
    prediction = predict(plan_on("h100x8", 2))
    known = ranges(prediction)
    for low, high, value in (
        (*known.step_seconds, prediction.step_s),
        (*known.tokens_per_second_per_device, prediction.tokens_per_s_per_device),
        (*known.mfu_full, prediction.mfu(causal=False)),
        (*known.peak_bytes, prediction.peak_bytes),
    ):
        assert low < value < high < 2 * low
    slow, fast = known.step_seconds[1], known.tokens_per_second_per_device[0]
    assert slow * fast * 16 == pytest.approx(prediction.tokens_per_step)
    assert known.pooled, "no published row is of this engine"


def test_software_with_rows_has_its_own_range_and_other_software_the_pool() -> None:
    plan = plan_on("a100x8", 4)
    known = relative_range(plan, replace(MESHWRIGHT, name="fsdp1", is_meshwright=False))
    unknown = relative_range(plan, replace(MESHWRIGHT, name="nobody's", is_meshwright=False))
    assert not known.pooled and unknown.pooled
    assert unknown == relative_range(plan)
    assert known.high / known.low < unknown.high / unknown.low


def test_experts_are_known_less_well() -> None:
    dense, routed = plan_on("h100x8", 4), plan_on("h100x8", 4, "qwen3-30b-a3b")
    of_dense, of_routed = relative_range(dense), relative_range(routed)
    assert of_routed.high / of_routed.low > of_dense.high / of_dense.low


def test_less_room_makes_a_fit_less_likely() -> None:
    prediction = predict(plan_on("h100x8", 2))
    shares = []
    for room in (0.7, 0.9, 1.0, 1.1, 1.5):
        device = replace(prediction.plan.cluster.device, memory_bytes=int(prediction.peak_bytes * room) + 2**30)
        cluster = replace(prediction.plan.cluster, device=device)
        shares.append(fit_probability(replace(prediction, plan=replace(prediction.plan, cluster=cluster))))
    assert shares == sorted(shares) and shares[0] < 0.05 and shares[-1] > 0.95
    assert 0.2 < shares[2] < 0.8 or memory_range(prediction.plan).low > 0.9


@settings(deadline=None)
@given(st.floats(-3, 3))
def test_share_below_is_that_of_the_quantiles(value: float) -> None:
    even = tuple(-1 + step / 20 for step in range(41))
    share = share_below(even, value)
    assert share == pytest.approx(min(max((value + 1) / 2, 1 / 80), 1 - 1 / 80), abs=1e-9)
    assert share_below(even, inf) < 1 and share_below(even, -inf) > 0


def drawn(seed: int, models: int, each: int) -> list[RowError]:
    """Errors of models that are each off by something of their own, and rows by something of theirs."""
    dice = random.Random(seed)
    groups = row_groups("drawn", routed=False, nodes=2)
    errors = []
    for model in range(models):
        bias = dice.gauss(0, 0.1)
        errors += [RowError(groups, (model,), dice.gauss(bias, 0.02)) for _ in range(each)]
    return errors


def test_models_nobody_has_run_lie_within_the_ranges_of_others() -> None:
    """Of each draw the last model is left out; its rows lie in the range as often as is said, about."""
    inside, group = [], "drawn, dense, to 8 nodes"
    for seed in range(40):
        rows = drawn(seed, models=21, each=20)
        others, last = rows[:400], rows[400:]
        edges = quantiles(distributions(others, {group})[group])
        inside += [edges[2] <= row.error <= edges[STEPS - 2] for row in last]
    assert 0.8 <= sum(inside) / len(inside) <= 0.95


def test_a_model_with_many_rows_counts_as_one_with_few() -> None:
    groups = row_groups(POOLED_GROUP, routed=False, nodes=1)
    rows = [RowError(groups, ("many",), log(2))] * 1000 + [RowError(groups, ("few",), log(0.5))] * 2
    spread = distributions(rows)[POOLED_GROUP]
    assert sum(weight for error, weight in spread if exp(error) > 1) == pytest.approx(0.5)
    assert sum(weight for _, weight in spread) == pytest.approx(1)


def of_software(name: str, model: str, errors: list[float], nodes: int = 2) -> list[RowError]:
    return [RowError(row_groups(name, routed=False, nodes=nodes), (model,), error) for error in errors]


def test_software_with_many_models_counts_as_one_with_few_for_software_without_rows() -> None:
    rows = of_software("one", "a", [log(2)] * 3)
    rows += [row for model in "bcdefg" for row in of_software("other", model, [log(0.5)])]
    spread = distributions(rows)[POOLED_GROUP]
    assert sum(weight for error, weight in spread if exp(error) > 1) == pytest.approx(0.5)


def test_software_without_rows_has_no_narrower_a_range_than_any_that_has() -> None:
    dice = random.Random(3)
    rows = [row for name, sigma in (("sure", 0.01), ("surer", 0.005), ("wild", 0.2)) for model in "abcdefghijklmnop"
            for row in of_software(name, f"{name} {model}", [dice.gauss(0, sigma) for _ in range(9)])]  # fmt: skip

    def width(group: str) -> float:
        error_quantiles = quantiles(spreads[group])
        return error_quantiles[STEPS - EDGE] - error_quantiles[EDGE]

    spreads = distributions(rows)
    for size in ("", ", to 8 nodes"):
        scored = [width(f"{name}, dense{size}") for name in ("sure", "surer", "wild")]
        assert width(f"{POOLED_GROUP}, dense{size}") >= max(scored) * 0.999
    assert width(POOLED_GROUP) >= width("wild, dense") * 0.999


def test_shipped_ranges_of_software_without_rows_are_the_widest_of_their_kind() -> None:
    """Of all that --for offers and that was scored, on one node, on a few and on many."""
    for nodes in (1, 4, 32):
        plan = plan_on("a100x8", nodes)
        unknown = relative_range(plan, replace(MESHWRIGHT, name="nobody's", is_meshwright=False))
        for name in ("torchtitan", "megatron-core", "megatron-core-2024", "fsdp1"):
            known = relative_range(plan, replace(MESHWRIGHT, name=name, is_meshwright=False))
            assert known.high / known.low <= unknown.high / unknown.low * 1.001, (name, nodes)
