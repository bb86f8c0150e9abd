"""Waiting in a pipeline: what is played against the lectures' closed forms, and against the longest path."""

from fractions import Fraction
from functools import cache
from random import Random

import pytest

from meshwright.planner.cost.micro_batch import MicroBatchCost
from meshwright.planner.time.timeline import least_s, pipeline_s
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.replay import Times, needs, placement_of, replay
from meshwright.spec.layout.schedule import Actions, refusal, schedule

EVERY = [("afab", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)]


def waiting(name: str, p: int, m: int, v: int = 1, forward: int = 2, inputs: int = 2, weights: int = 2) -> Fraction:
    """(total - work of a rank) / that work; equal stages, no time between ranks. Whole seconds: exact."""
    stage = MicroBatchCost(forward_s=forward, input_s=inputs, weight_s=weights)
    work = m * v * (forward + inputs + weights)
    total = pipeline_s(Layout(pp=p, vp=v, schedule=name), m, [stage] * (p * v), 0.0)  # type: ignore[arg-type]
    return Fraction(round(total - work), work)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 8), (8, 8), (8, 64), (16, 128)])
@pytest.mark.parametrize("name", ["afab", "1f1b"])
def test_afab_and_1f1b_wait_for_p_minus_1_of_m(name: str, p: int, m: int) -> None:
    assert waiting(name, p, m) == Fraction(p - 1, m)
    assert waiting(name, p, m, forward=1, inputs=3, weights=1) == Fraction(p - 1, m)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 64, 4), (8, 16, 6)])
def test_interleaving_divides_the_waiting_by_its_stages(p: int, m: int, v: int) -> None:
    assert waiting("interleaved", p, m, v) == Fraction(p - 1, v * m)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 24), (8, 64)])
def test_zero_bubble_h1_waits_a_third(p: int, m: int) -> None:
    """Qi et al. 2023, table 2: (p - 1)(F + B - W); with equal thirds (p - 1)/(3 m)."""
    assert waiting("zb-h1", p, m) == Fraction(p - 1, 3 * m)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_zero_bubble_v_waits_for_its_first_input_only(p: int, m: int) -> None:
    """No rank waits once it has begun; the last one begins p - 1 forward passes after the first."""
    assert waiting("zb-v", p, m, 2) == Fraction((p - 1) * 2, m * 2 * 6)


def longest_s(actions: Actions, times: list[Times], send_s: float) -> float:
    """The longest path: an action ends as long after the last that it waits for as it takes."""
    holders = placement_of(actions)
    made = {
        ("F" if action.kind == "F" else "B", action.stage, action.micro_batch): (rank, index)
        for rank, rank_actions in enumerate(actions)
        for index, action in enumerate(rank_actions)
        if action.kind != "W"
    }

    @cache
    def end_s(rank: int, index: int) -> float:
        action = actions[rank][index]
        f, b, w = times[action.stage]
        before = [end_s(rank, index - 1) if index else 0.0]
        before += [end_s(*made[q]) + (send_s if holders[q[1]] != rank else 0.0) for q in needs(action, len(holders))]
        return max(before) + {"F": f, "B": b, "W": w, "BW": b + w}[action.kind]

    return max(end_s(rank, len(rank_actions) - 1) for rank, rank_actions in enumerate(actions))


@pytest.mark.parametrize(("name", "v"), EVERY)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_a_play_takes_the_longest_path_of_what_is_executed(name: str, v: int, p: int, m: int) -> None:
    random = Random(p * m + v)
    times = [Times(random.random(), random.random(), random.random()) for _ in range(p * v)]
    actions = schedule(name, p, m, v)
    assert replay(actions, times, 0.1).total_s == pytest.approx(longest_s(actions, times, 0.1), rel=1e-12)
    short = pipeline_s(Layout(pp=p, vp=v, schedule=name), m, times, 0.1)  # type: ignore[arg-type]
    assert short == replay(actions, times, 0.1).total_s


@pytest.mark.parametrize(("name", "v"), EVERY[1:])
def test_a_long_step_is_its_beginning_and_the_steady_state(name: str, v: int) -> None:
    """Uneven stages: a few rounds are played, the rest is the busiest rank's work; the whole play says the same within
    a hundredth (interleaved ranks still make up for late starts)."""
    p, m, random = 4, 64, Random(7)
    stages = [MicroBatchCost(forward_s=1 + 0.2 * random.random(), input_s=1.3, weight_s=1.0) for _ in range(p * v)]
    short = pipeline_s(Layout(pp=p, vp=v, schedule=name), m, stages, 0.01)  # type: ignore[arg-type]
    assert short == pytest.approx(replay(schedule(name, p, m, v), stages, 0.01).total_s, rel=0.01)


@pytest.mark.parametrize(("name", "v"), EVERY[:5])
def test_the_least_time_is_that_of_equal_stages(name: str, v: int) -> None:
    p, m = 4, 16
    stage = MicroBatchCost(forward_s=1.0, input_s=1.0, weight_s=1.0)
    total = pipeline_s(Layout(pp=p, vp=v, schedule=name), m, [stage] * (p * v), 0.0)  # type: ignore[arg-type]
    assert total == pytest.approx(least_s(name, p, v, m, [stage] * (p * v), 0.0))


@pytest.mark.parametrize(("name", "v"), [*EVERY, ("zb-h1", 3)])
def test_no_play_takes_less_than_the_least_time(name: str, v: int) -> None:
    random = Random(3)
    for p in (2, 3, 4, 7):
        for m in (1, 2, p, 2 * p - 2, 2 * p, 3 * p + 1, 5 * p):
            if m < 1 or refusal(name, p, m, v):
                continue
            times = [[random.choice((0.1, 1.0, 3.0)) for _ in range(3)] for _ in range(p * v)]
            send_s = random.choice((0.0, 0.3))
            layout = Layout(pp=p, vp=v, schedule=name)  # type: ignore[arg-type]
            stages = [MicroBatchCost(forward_s=f, input_s=b, weight_s=w) for f, b, w in times]
            least = least_s(name, p, v, m, stages, send_s)
            assert least <= replay(schedule(name, p, m, v), stages, send_s).total_s * (1 + 1e-12), (p, m)
            assert least <= pipeline_s(layout, m, stages, send_s) * (1 + 1e-12), (p, m)
