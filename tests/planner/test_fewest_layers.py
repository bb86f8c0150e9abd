"""How few layers must recompute, beside trying every number."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from meshwright.planner.memory.rank_memory import DRIVER_BYTES
from meshwright.planner.search.ranking import search
from meshwright.planner.search.recommend import WORTH, cheapest_recompute, fewest_layers, is_bold, recommend
from meshwright.planner.step.predict import build_estimator
from meshwright.planner.step.prediction import fit_probability
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.layout.layout import RECOMPUTE

MODELS = ("llama-3.1-8b", "mixtral-8x7b", "qwen3-14b", "deepseek-v3")


def drawn(dice: Random) -> Plan:
    shape = presets.model(dice.choice(MODELS))
    pp, schedule, vp = dice.choice([(1, "1f1b", 1), (2, "1f1b", 1), (4, "zb-h1", 1), (4, "interleaved", 2)])
    layout = Layout(
        dp_shard=8, zero=1 if pp > 1 else 3, pp=pp, vp=vp, schedule=schedule, micro_batch=1, compile="on",
    )  # type: ignore[arg-type]  # fmt: skip
    recipe = Recipe(sequence=dice.choice([2048, 8192]), global_batch=64, precision="bf16")
    return Plan(model=shape, layout=layout, recipe=recipe, cluster=presets.cluster("h100x8", pp))


@pytest.mark.parametrize("seed", range(8))
def test_the_fewest_layers_are_those_that_trying_all_finds(seed: int) -> None:
    """Each layer more takes less memory and more time; of all that fit, none does with fewer."""
    dice = Random(seed)
    asked = drawn(dice)
    estimator, policy = build_estimator(asked), dice.choice([word for word in RECOMPUTE[1:] if word != "selective"])
    layout = replace(asked.layout, recompute=policy)
    most = max(map(len, estimator.costs.split(layout)))
    numbers = [*range(1, most), 0]
    predictions = [
        estimator.predict(replace(asked, layout=replace(layout, recompute_layers=number))) for number in numbers
    ]
    none = estimator.predict(asked)
    for prediction, other in pairwise([none, *predictions]):
        assert prediction.peak_bytes >= other.peak_bytes and prediction.step_s <= other.step_s * (1 + 1e-12)
    room = predictions[-1].peak_bytes + dice.random() * (none.peak_bytes - predictions[-1].peak_bytes)
    want = next(
        number for number, prediction in zip(numbers, predictions, strict=True) if prediction.peak_bytes <= room
    )
    assert fewest_layers(estimator, layout, room, none.peak_bytes) == replace(layout, recompute_layers=want)
    assert fewest_layers(estimator, layout, 0.99 * predictions[-1].peak_bytes, none.peak_bytes) is None
    assert cheapest_recompute(estimator, asked.layout, none.peak_bytes) is None


@pytest.mark.parametrize("seed", range(4))
def test_of_all_policies_and_numbers_of_layers_the_fastest_that_fits(seed: int) -> None:
    dice = Random(10 + seed)
    asked = drawn(dice)
    estimator = build_estimator(asked)
    most = max(map(len, estimator.costs.split(asked.layout)))
    every = [
        estimator.predict(replace(asked, layout=replace(asked.layout, recompute=policy, recompute_layers=number)))
        for policy in RECOMPUTE[1:]
        for number in range(most)
    ]
    low, high = min(prediction.peak_bytes for prediction in every), estimator.predict(asked).peak_bytes
    room = low + (0.1 + 0.8 * dice.random()) * (high - low)
    recomputed = cheapest_recompute(estimator, asked.layout, room)
    assert recomputed is not None
    fitting = [prediction.step_s for prediction in every if prediction.peak_bytes <= room]
    taken = estimator.predict(replace(asked, layout=recomputed)).step_s
    assert min(fitting) <= taken <= (1 + (0 if recomputed.recompute_layers else WORTH)) * min(fitting) * (1 + 1e-12)


@pytest.mark.parametrize("gib", [24, 30, 40, 60])
def test_what_is_recommended_recomputes_no_more_than_it_must(gib: int) -> None:
    recipe = Recipe(sequence=8192, global_batch=64, precision="bf16")
    device = replace(presets.device("h100"), memory_bytes=int(gib * 2**30 + DRIVER_BYTES))
    cluster = replace(presets.cluster("h100x8", 1), device=device)
    asked = Plan(model=presets.model("llama-3.1-8b"), recipe=recipe, cluster=cluster)
    estimator, fixed = build_estimator(asked), {"tp": (1, 2), "cp": (1,), "pp": (1,)}
    alone = next(prediction for prediction in search(estimator, asked, fixed=fixed).best if not is_bold(prediction))
    best = recommend(estimator, asked, search(estimator, asked, fixed=fixed), fixed).best[0]
    layout = best.plan.layout
    assert best.step_s <= alone.step_s and not is_bold(best)
    if layout.recompute_layers:
        fewer = layout.recompute_layers - 1
        less = replace(layout, recompute_layers=fewer, recompute=layout.recompute if fewer else "none")
        assert is_bold(estimator.predict(replace(asked, layout=less)))


def test_a_policy_that_is_given_is_kept() -> None:
    recipe = Recipe(sequence=8192, global_batch=512, precision="bf16")
    asked = Plan(model=presets.model("llama-3.1-8b"), recipe=recipe, cluster=presets.cluster("h100x8", 4))
    estimator = build_estimator(asked)
    for fixed in ({"recompute": ("full",)}, {"recompute": RECOMPUTE[1:], "recompute_layers": (5,)}):
        fixed = {"tp": (1,), "pp": (1,), "cp": (1,), **fixed}
        best = recommend(estimator, asked, search(estimator, asked, fixed=fixed), fixed).best
        assert {prediction.plan.layout.recompute_layers for prediction in best} == set(
            fixed.get("recompute_layers", (0,))
        )
        assert all(prediction.plan.layout.recompute in fixed["recompute"] for prediction in best)


@pytest.mark.parametrize(("model", "nodes"), [("llama-3.1-8b", 4), ("llama-3.1-8b", 1), ("llama-3.1-70b", 16)])
def test_the_recommended_layout_is_the_fastest_that_fits_with_95_percent(model: str, nodes: int) -> None:
    asked = Plan(
        model=presets.model(model), recipe=Recipe(sequence=8192, global_batch=512, precision="bf16"),
        cluster=presets.cluster("h100x8", nodes=nodes),
    )  # fmt: skip
    estimator = build_estimator(asked)
    best, *others = recommend(estimator, asked, search(estimator, asked)).best
    assert fit_probability(best) >= 0.95
    assert all(fit_probability(prediction) < 0.95 for prediction in others if prediction.step_s < best.step_s)
    assert [is_bold(prediction) for prediction in others] == [
        fit_probability(prediction) < 0.95 for prediction in others
    ]
