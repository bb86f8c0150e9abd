"""The sweep against searching every cluster, its bound against what searches find, shared costs against fresh ones."""

from dataclasses import replace
from math import log

import pytest

from meshwright.planner.rent.clusters import offers_of
from meshwright.planner.rent.goodput import Conditions
from meshwright.planner.rent.prices import shipped
from meshwright.planner.rent.run_on import RentedRun, below, digits, normal, rent_run, rounded, time_error
from meshwright.planner.rent.sweep import WORTH, RentRequest, fastest, front, least_device_s, sweep
from meshwright.planner.search.ranking import search
from meshwright.planner.search.recommend import is_bold
from meshwright.planner.step.predict import build_estimator
from meshwright.planner.step.prediction import fit_probability, relative_range
from meshwright.spec import Plan, Recipe, presets

SMALL = Plan(
    model=presets.model("llama-3.2-1b"),
    recipe=Recipe(sequence=2048, global_batch=64, precision="bf16"),
    cluster=presets.cluster("h100"),
)
DEVICES = ("H100-SXM-80", "A100-SXM-80", "B200-SXM", "MI300X", "RTX-4090")
NODES = (1, 2, 4)
ASKED = RentRequest(plan=SMALL, tokens=3e10)


def every() -> list[RentedRun]:
    """Each cluster searched by itself, with fresh costs and no bound."""
    runs = []
    for device in DEVICES:
        for offer in offers_of(device, shipped(), NODES):
            plan = replace(SMALL, cluster=offer.cluster)
            best, _ = fastest(build_estimator(plan), plan, {}, float("inf"))
            if best is not None:
                runs.append(rent_run(offer, best, ASKED.tokens, Conditions()))
    return runs


@pytest.mark.long
def test_the_front_is_that_of_searching_every_cluster() -> None:
    swept = sweep(replace(ASKED, thorough=True), shipped(), DEVICES, NODES)
    expected = front(every())
    for best in expected:
        assert any(run.usd <= best.usd * 1.001 and run.wall_s <= best.wall_s * (1 + WORTH) for run in swept.front)
    for run in swept.front:
        same = [best for best in every_by_name(expected) if best == (run.offer.name, run.offer.nodes)]
        assert len(same) <= 1
    assert swept.clusters == len(swept.runs) + swept.dominated + swept.too_long + len(swept.unfit)
    assert swept.dominated > 0


def every_by_name(runs: list[RentedRun]) -> list[tuple[str, int]]:
    return [(run.offer.name, run.offer.nodes) for run in runs]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "device"),
    [("llama-3.1-8b", "h100"), ("llama-3.1-8b", "a100-40"), ("llama-3.2-1b", "mi355x"), ("llama-3.2-1b", "l40s"),
     ("qwen3-30b-a3b", "h100"), ("mixtral-8x7b", "b200")],
)  # fmt: skip
def test_no_search_finds_fewer_device_seconds_than_the_bound(model: str, device: str) -> None:
    for nodes in (1, 4):
        plan = replace(SMALL, model=presets.model(model), cluster=presets.cluster(f"{device}x8", nodes))
        estimator = build_estimator(plan)
        best = search(estimator, plan, listed=1).best
        if best:
            assert best[0].step_s * plan.cluster.devices >= least_device_s(estimator)


@pytest.mark.parametrize("nodes", [2, 16])
def test_costs_of_one_number_of_nodes_serve_another(nodes: int) -> None:
    plan = replace(SMALL, cluster=presets.cluster("h100x8", 1))
    first = build_estimator(plan)
    search(first, plan, listed=3)
    other = replace(plan, cluster=presets.cluster("h100x8", nodes))
    shared, fresh = search(first.on_nodes(nodes), other, listed=3), search(build_estimator(other), other, listed=3)
    assert [(prediction.plan.layout, prediction.step_s, prediction.peak_bytes) for prediction in shared.best] == [
        (prediction.plan.layout, prediction.step_s, prediction.peak_bytes) for prediction in fresh.best
    ]


def test_layouts_below_a_limit_are_those_of_the_whole_search() -> None:
    plan = replace(SMALL, cluster=presets.cluster("a100-40x8", 2))
    estimator = build_estimator(plan)
    whole = search(estimator, plan, listed=10)
    limit = whole.best[4].step_s
    part = search(estimator, plan, listed=10, below_s=limit)
    assert [prediction.step_s for prediction in part.best] == [
        prediction.step_s for prediction in whole.best if prediction.step_s < limit
    ]
    assert part.legal == whole.legal
    nothing = search(estimator, plan, listed=1, below_s=whole.best[0].step_s * 0.9)
    assert not nothing.best and nothing.slower


def test_what_is_recommended_leaves_memory_and_recomputes_no_more_than_it_must() -> None:
    plan = replace(SMALL, model=presets.model("llama-3.1-8b"), cluster=presets.cluster("h100x8", 1))
    best, too_large = fastest(build_estimator(plan), plan, {}, float("inf"))
    assert best is not None and not too_large and not is_bold(best)
    tiny = replace(plan, model=presets.model("llama-3.1-405b"))
    assert fastest(build_estimator(tiny), tiny, {}, float("inf")) == (None, True)


def test_the_front_has_no_run_that_another_beats() -> None:
    runs = sweep(ASKED, shipped(), DEVICES, NODES).runs
    chosen = front(runs)
    for run in chosen:
        assert not any(other.usd < run.usd and other.wall_s < run.wall_s for other in runs)
    assert [run.usd for run in chosen] == sorted(run.usd for run in chosen)
    assert [run.wall_s for run in chosen] == sorted((run.wall_s for run in chosen), reverse=True)


def test_the_batch_is_the_same_on_every_cluster() -> None:
    runs = sweep(ASKED, shipped(), DEVICES, NODES).runs
    assert {run.prediction.tokens_per_step for run in runs} == {64 * 2048}


def test_ranges_hold_the_mean_and_grow_with_the_error() -> None:
    run = sweep(ASKED, shipped(), ("H100-SXM-80",), (1,)).runs[-1]
    low, high = run.range_s
    assert low < run.wall_s < high and run.ends_within(high) == pytest.approx(0.95, abs=0.01)
    assert run.ends_within(low) == pytest.approx(0.05, abs=0.01)
    assert run.costs_at_most(run.range_usd[1]) == pytest.approx(0.95, abs=0.01)
    assert 0.5 < fit_probability(run.prediction) <= 1.0


def test_errors_are_those_of_the_planners_ranges() -> None:
    plan = replace(SMALL, cluster=presets.cluster("h100"))
    prediction = search(build_estimator(plan), plan, listed=1).best[0]
    low, high, _ = relative_range(plan)
    error = time_error(prediction)
    assert below(prediction.step_s * low, prediction.step_s * high, error) == pytest.approx(0.9995, abs=5e-4)
    assert normal(log(high / low) / 2 / error) - normal(-log(high / low) / 2 / error) == pytest.approx(0.9, abs=1e-3)


def test_probabilities_and_digits() -> None:
    assert below(1.0, 1.0, 0.1) == 0.5 and below(1.0, 2.0, 0.1) > 0.999 and below(2.0, 1.0, 0.1) < 0.001
    assert (digits(0.001), digits(0.1), digits(0.5)) == (3, 2, 1)
    assert rounded(103_760.0, 0.14) == 100_000 and rounded(2.76, 0.4) == 3


@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen3-30b-a3b"])
def test_where_nothing_fails_the_range_is_the_planners(model: str) -> None:
    """It is not even: of experts the upper end is two and a half times as far as the lower one."""
    plan = replace(SMALL, model=presets.model(model), cluster=presets.cluster("h100x8"))
    offer = list(offers_of("H100-SXM-80", shipped(), (1,)))[-1]
    calm = Conditions(mtbf_device_hours=1e9, restart_s=0.0, evaluation=0.0)
    run = rent_run(offer, search(build_estimator(plan), plan, listed=1).best[0], 3e9, calm)
    low, high, _ = relative_range(plan)
    assert run.range_s[0] / run.wall_s == pytest.approx(low, rel=0.005)
    assert run.range_s[1] / run.wall_s == pytest.approx(high, rel=0.005)
