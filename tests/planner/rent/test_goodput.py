"""Intervals between saves against what they minimize, and the closed form of goodput against playing every failure."""

from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.rent.goodput import (
    BUSY,
    LLAMA_3,
    Conditions,
    FailureRecord,
    Saves,
    asked_conditions,
    best_interval,
    expected_wall_s,
    mean_wait,
    rare_interval,
    saves_of,
    simulate,
    time_run,
)
from tests.planner.rent.intervals import daly, young

DAY_S = 86_400.0
OPT = FailureRecord(name="OPT-175B", interruptions=105, devices=992, days=60)
"""arXiv:2205.01068: 35 manual restarts and an estimated 70 automatic ones in two months (recalled)."""
BLOOM = FailureRecord(name="BLOOM 176B", interruptions=1.5, devices=384, days=7)
"""arXiv:2211.05100: one or two GPU failures a week on 384 GPUs (recalled)."""


def optimum(save_s: float, restart_s: float, mtbf_s: float) -> tuple[float, float]:
    """The best interval and its time, by golden section of the exact expectation: no formula of anybody."""
    low, high = 1e-6 * mtbf_s, 20 * mtbf_s
    share = (5**0.5 - 1) / 2
    for _ in range(200):
        first, second = high - share * (high - low), low + share * (high - low)
        better = expected_wall_s(1.0, first, save_s, restart_s, mtbf_s) < expected_wall_s(
            1.0, second, save_s, restart_s, mtbf_s
        )
        low, high = (low, second) if better else (first, high)
    return low, expected_wall_s(1.0, low, save_s, restart_s, mtbf_s)


@pytest.mark.parametrize("share", [1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("restart_s", [0.0, 600.0])
def test_dalys_interval_is_the_optimum_and_youngs_is_near_it(share: float, restart_s: float) -> None:
    mtbf_s = 40_000.0
    save_s = share * mtbf_s
    best_s, least = optimum(save_s, restart_s, mtbf_s)
    assert daly(save_s, mtbf_s) == pytest.approx(best_s, rel=0.03)
    assert expected_wall_s(1.0, daly(save_s, mtbf_s), save_s, restart_s, mtbf_s) <= least * (1 + 1e-4)
    if share <= 0.01:
        assert expected_wall_s(1.0, young(save_s, mtbf_s), save_s, restart_s, mtbf_s) <= least * (1 + 1e-3)


def test_dalys_own_words() -> None:
    """His abstract: a good approximation up to delta = M / 2; beyond 2 M, M itself."""
    assert daly(2.1, 1.0) == 1.0 and daly(2.0, 1.0) == 1.0
    assert young(2.0, 100.0) == 20.0


def test_the_expectation_is_that_of_segments_that_are_repeated_until_they_succeed() -> None:
    """M (e^(L/M) - 1) is the mean time until a gap of L between events of a Poisson process: a textbook result."""
    assert expected_wall_s(10.0, 10.0, 0.0, 0.0, 1e9) == pytest.approx(10.0, rel=1e-6)
    assert expected_wall_s(10.0, 10.0, 0.0, 0.0, 10.0) == pytest.approx(10 * (exp(1) - 1))


def test_no_run_saves_more_often_than_it_steps_or_writes() -> None:
    assert best_interval(1e-6, 100.0, 1e-3, 30.0, 1e6) == 30.0
    assert best_interval(1e-3, 1e5, 60.0, 30.0, 1e6) == 60.0 / BUSY
    assert best_interval(100.0, 1e7, 1.0, 1.0, 500.0) == 500.0
    # Failures come every 172 s and writing takes 68: a tenth of the time would leave next to nothing that lasts.
    assert best_interval(0.05, 172.0, 68.0, 1.0, 1e6) == 68.0


@pytest.mark.parametrize("share", [1e-12, 1e-9, 1e-6, 1e-4, 1e-2, 0.2, 1.0, 5.0])
def test_saves_are_as_rare_as_a_thousandth_of_the_time_allows(share: float) -> None:
    mtbf_s = 40_000.0
    save_s, least_s = share * mtbf_s, optimum(share * mtbf_s, 0.0, mtbf_s)[1]
    rare_s = rare_interval(save_s, mtbf_s)
    assert expected_wall_s(1.0, rare_s, save_s, 0.0, mtbf_s) <= least_s * 1.001001
    # Where even an hour is too short, the optimum itself.
    longer_s = expected_wall_s(1.0, rare_s * 1.01, save_s, 0.0, mtbf_s)
    assert longer_s > least_s * 1.001 or rare_s == pytest.approx(optimum(save_s, 0.0, mtbf_s)[0], rel=1e-3)
    # Where a save costs next to nothing, a tenth of a percent of lost work is tau / 2 M.
    if share <= 1e-9:
        assert rare_s == pytest.approx(0.002 * mtbf_s, rel=0.1)
        assert rare_interval(share, 1000 * mtbf_s) == 3600.0


def test_a_bandwidth_that_nobody_named_is_limited_by_the_whole_storage() -> None:
    """Llama 3's store took 2 TB/s. Nodes alone would be counted at 16."""
    assumed, asked = Conditions(), asked_conditions(storage=2.0)
    assert saves_of(0, 2e12, 8192, 50e9, assumed).write_s == 1.0
    assert saves_of(0, 2e12, 8192, 50e9, asked).write_s == pytest.approx(1 / 8.192)
    assert saves_of(0, 2e12, 100, 50e9, assumed).write_s == 10.0


def test_published_rates() -> None:
    """Llama 3 says 419 in 54 days on 16,384 GPUs: one every 3.1 hours of the cluster."""
    assert LLAMA_3.mtbf_device_hours / LLAMA_3.devices == pytest.approx(3.09, abs=0.01)
    assert OPT.mtbf_device_hours < BLOOM.mtbf_device_hours < LLAMA_3.mtbf_device_hours


def test_waits_of_a_long_run_are_erlangs_loss_formula() -> None:
    """Values of the usual tables: 10 places lose 1.84 % of a load of 5; 1 place loses load / (1 + load)."""
    for places, load, lost in ((10, 5.0, 0.0184), (1, 0.5, 1 / 3)):
        waited = mean_wait(places - 1, load, 1e5) / 1e5
        assert waited / (1 + waited) == pytest.approx(lost, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(spares=st.integers(0, 20), load=st.floats(0.01, 40), length=st.floats(0.02, 30))
def test_waits_of_any_run_are_those_of_the_markov_chain(spares: int, load: float, length: float) -> None:
    """The exponential of the chain's matrix, with one state more that counts the time in the last."""
    chain = torch.zeros(spares + 2, spares + 2, dtype=torch.float64)
    for number in range(spares + 1):
        for other, rate in ((number + 1, load), (number - 1, float(number))):
            if 0 <= other <= spares:
                chain[number, other] += rate
                chain[number, number] -= rate
    chain[spares, spares + 1] = 1.0
    waited = load / (spares + 1) * torch.matrix_exp(chain * length)[0, spares + 1].item()
    assert mean_wait(spares, load, length) == pytest.approx(waited, rel=0.03, abs=0.01 * length)


@pytest.mark.parametrize("hours", [3, 15, 48])
def test_short_runs_begin_with_all_nodes_whole(hours: int) -> None:
    """Nodes come back after a day, so a run of hours has used few of its spares: Erlang's formula alone gave 30 %."""
    conditions = Conditions(mtbf_device_hours=1000.0, spares=32)
    timing = time_run(hours * 3600.0, 5.0, 2048, 256, saves_of(1e8, 1e11, 256, 50e9, conditions), conditions)
    assert simulate(timing, seed=3, runs=100).goodput == pytest.approx(timing.goodput, abs=0.03)


CASES = [
    (20, 8, 1, 1e11), (100, 64, 8, 1e12), (30, 1024, 128, 1e12), (10, 2048, 256, 1e11), (54, 16_384, 2048, 5.7e12),
]  # fmt: skip


@pytest.mark.parametrize("spares", [None, 0, 1, 4])
@pytest.mark.parametrize(("days", "devices", "nodes", "checkpoint"), CASES)
def test_the_closed_form_agrees_with_the_simulation(
    days: float, devices: int, nodes: int, checkpoint: float, spares: int | None
) -> None:
    saves = saves_of(checkpoint / devices, checkpoint, nodes, 50e9, Conditions())
    timing = time_run(days * DAY_S, 5.0, devices, nodes, saves, Conditions(spares=spares))
    played = simulate(timing, seed=1, runs=400 if devices < 5000 else 60)
    assert played.failures == pytest.approx(timing.failures, rel=0.1, abs=0.1)
    close = 0.003 if spares is None else 0.02
    assert played.goodput == pytest.approx(timing.goodput, abs=close)


@settings(max_examples=15, deadline=None)
@given(
    mtbf_s=st.floats(2e3, 1e6), stall_s=st.floats(0.01, 60), write_s=st.floats(0.1, 200), restart_s=st.floats(0, 900)
)
def test_it_agrees_for_any_saves_and_restarts(mtbf_s: float, stall_s: float, write_s: float, restart_s: float) -> None:
    conditions = Conditions(mtbf_device_hours=mtbf_s * 64 / 3600, restart_s=restart_s, hardware=0.0, evaluation=0.0)
    saves = Saves(total_bytes=0.0, stall_s=stall_s, write_s=write_s)
    timing = time_run(200 * mtbf_s, 1.0, 64, 8, saves, conditions)
    played = simulate(timing, seed=2, runs=20)
    assert played.goodput == pytest.approx(timing.goodput, rel=0.05)


def test_the_same_seed_plays_the_same_run() -> None:
    timing = time_run(20 * DAY_S, 5.0, 512, 64, saves_of(1e9, 1e12, 64, 50e9, Conditions()), Conditions())
    assert simulate(timing, seed=4) == simulate(timing, seed=4) != simulate(timing, seed=5)


def test_spares_are_as_many_as_make_the_run_cheapest() -> None:
    saves = saves_of(1e9, 1e12, 256, 50e9, Conditions())
    best = time_run(30 * DAY_S, 5.0, 2048, 256, saves, Conditions())
    assert best.spares > 0

    def bill(spares: int) -> float:
        timing = time_run(30 * DAY_S, 5.0, 2048, 256, saves, Conditions(spares=spares))
        return timing.wall_s * (timing.nodes + timing.spares)

    assert bill(best.spares) == min(map(bill, range(20)))
