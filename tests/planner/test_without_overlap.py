"""layout.overlap=off in the planner: every second of communication is exposed, and nothing is slowed by it."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.step.predict import build_estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.planner.time.collectives import StageContents
from meshwright.spec import Layout, Plan, Recipe, presets

MODEL = presets.model("llama-3.1-8b")
RECIPE = Recipe(sequence=8192, global_batch=64, precision="bf16")


def predicted(layout: Layout, nodes: int = 1) -> Prediction:
    plan = Plan(model=MODEL, recipe=RECIPE, layout=layout, cluster=presets.cluster("h100x8", nodes))
    return build_estimator(plan).predict(plan)


def both(nodes: int = 1, **degrees: Any) -> tuple[Prediction, Prediction]:
    layout = Layout(micro_batch=1, compile="off", cuda_graphs="off", **degrees)
    return predicted(layout, nodes), predicted(replace(layout, overlap="off"), nodes)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_all_sums_and_gathers_are_exposed(zero: int) -> None:
    """The step is its computation and the closed form of the traffic: m gathers twice, m sums, and so on."""
    split: dict[str, Any] = {"dp_shard": 32, "zero": zero} if zero else {"dp_replicate": 32}
    usual, serial = both(4, **split)
    layout, m = serial.plan.layout, 2
    estimator = build_estimator(serial.plan)
    contents = estimator.costs.contents(layout, 0)
    assert contents == StageContents((0,) * 32, True, True)
    state = estimator.states(layout, estimator.costs.held(layout, 0), m)
    sums_s, gather_s, copies_s = estimator.costs.sharing(layout, contents, state.parameter_bytes, state.gradient_bytes)
    exposed = serial.time.weights_s + serial.time.gradients_s
    head = estimator.costs.edges(layout).stays_whole  # its second gather is left out
    gathers = {0: 0.0, 1: 1.0, 2: 1.0, 3: m * (2 - head)}[zero]
    whole = (m if zero >= 2 else 1) * sums_s + copies_s + gathers * gather_s
    assert exposed == pytest.approx(whole)
    assert exposed > usual.time.weights_s + usual.time.gradients_s
    assert serial.time.compute_s < usual.time.compute_s  # no kernel shares the device with a collective
    assert serial.step_s > usual.step_s


@pytest.mark.parametrize("degrees", [{"tp": 8, "sp": True}, {"cp": 8}], ids=str)
def test_exchanges_of_the_passes_are_exposed(degrees: dict[str, Any]) -> None:
    usual, serial = both(**degrees)
    assert serial.time.exchange_s > usual.time.exchange_s
    assert serial.peak_bytes == usual.peak_bytes


def test_gathered_keys_hide_behind_nothing_anyway() -> None:
    usual, serial = both(cp=8, context="all-gather")
    assert serial.time.exchange_s == usual.time.exchange_s > 0
