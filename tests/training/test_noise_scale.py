"""The gradient noise scale, on gradients whose noise and length are known."""

import math
import random
from dataclasses import replace

import pytest
import torch

from meshwright.spec import BatchStage, Layout, Plan, Recipe
from meshwright.spec.errors import IllegalLayout
from meshwright.training.step.state import NoiseScale
from tests.model.shrunk import shrink

WIDTH, NOISE, LENGTH = 50, 3.0, 0.7
"""Gradient of one token: `LENGTH` along the first axis, plus noise of variance NOISE^2 along every axis."""
VARIANCE, SIGNAL = WIDTH * NOISE**2, LENGTH**2


def measured(sizes: list[int], generator: torch.Generator) -> tuple[list[float], float]:
    """Squared norms of the mean gradients of batches of so many tokens, and of all together."""
    true = torch.zeros(WIDTH, dtype=torch.float64)
    true[0] = LENGTH
    draws = [torch.randn(WIDTH, generator=generator, dtype=torch.float64) * NOISE / math.sqrt(b) + true for b in sizes]
    whole = sum((b * draw for b, draw in zip(sizes, draws, strict=True)), torch.zeros_like(true)) / sum(sizes)
    return [draw.square().sum().item() for draw in draws], whole.square().sum().item()


@pytest.mark.parametrize("sizes", [[64, 64], [64] * 8, [10, 200, 37, 64], [5, 500]], ids=str)
def test_both_terms_are_unbiased(sizes: list[int]) -> None:
    """Mean over many single measurements: within four standard errors of the truth, and that is not far."""
    generator = torch.Generator().manual_seed(0)
    variances, signals = [], []
    for _ in range(3000):
        once = NoiseScale()
        small, big = measured(sizes, generator)
        once.add(small, sizes, big)
        variances.append(once.variance / once.weight)
        signals.append(once.signal / once.weight)
    for estimates, truth in ((variances, VARIANCE), (signals, SIGNAL)):
        values = torch.tensor(estimates, dtype=torch.float64)
        error = values.std().item() / math.sqrt(len(estimates))
        assert abs(values.mean().item() - truth) < 4 * error
        assert error < 0.15 * truth, "the test could see a bias"


def test_the_scale_in_tokens() -> None:
    """Averaged before dividing: 918 tokens here, of which a single measurement would know little."""
    generator = torch.Generator().manual_seed(1)
    scale, scales = NoiseScale(), []
    for step in range(300):
        small, big = measured([4096] * 4, generator)
        scale.add(small, [4096] * 4, big)
        assert scale.tokens is not None
        if step > 50:
            scales.append(scale.tokens)
    assert sum(scales) / len(scales) == pytest.approx(VARIANCE / SIGNAL, rel=0.1)


def test_exact_where_nothing_is_random() -> None:
    scale = NoiseScale()
    for _ in range(3):
        scale.add([SIGNAL + VARIANCE / 8] * 4, [8] * 4, SIGNAL + VARIANCE / 32)
    assert scale.tokens == pytest.approx(VARIANCE / SIGNAL, rel=1e-9)


def test_nothing_is_said_before_a_measurement_or_while_noise_hides_the_signal() -> None:
    scale = NoiseScale()
    assert scale.tokens is None
    scale.add([1.0, 1.0], [4, 4], 0.2)
    assert scale.signal < 0 and scale.tokens is None
    still = NoiseScale()
    still.add([1.0, 1.0], [4, 4], 1.5)
    assert still.variance < 0 and still.tokens is None


def test_what_measures_nothing_changes_nothing() -> None:
    scale = NoiseScale()
    scale.add([3.0, 2.0], [4, 4], 1.6)
    before = replace(scale)
    scale.add([3.0], [8], 3.0)
    scale.add([], [], 0.0)
    scale.add([3.0, math.nan], [8, 0], 3.0)
    scale.add([math.inf, 2.0], [4, 4], math.inf)
    scale.add([3.0, 2.0], [4, 4], math.nan)
    assert scale == before


def test_a_micro_batch_without_valid_tokens_is_left_out() -> None:
    with_empty, without = NoiseScale(), NoiseScale()
    with_empty.add([3.0, math.nan, 2.0], [4, 0, 6], 1.6)
    without.add([3.0, 2.0], [4, 6], 1.6)
    assert with_empty == without and without.tokens is not None


def test_it_is_the_same_after_a_pause() -> None:
    rng = random.Random(0)
    scale, resumed = NoiseScale(), NoiseScale()
    for step in range(9):
        measurement = [3 + rng.random(), 2.0], [4, 6], 1.6
        scale.add(*measurement)
        resumed.add(*measurement)
        if step == 4:
            resumed = NoiseScale(*[resumed.variance, resumed.signal, resumed.weight])
    assert scale == resumed


def plan(batch: int, micro: int, ramp: tuple[BatchStage, ...] = (), every: int = 5) -> Plan:
    recipe = Recipe(global_batch=batch, batch_ramp=ramp, noise_scale_every=every)
    return Plan(model=shrink("llama-2-7b"), recipe=recipe, layout=Layout(micro_batch=micro))


@pytest.mark.parametrize(
    ("batch", "micro", "advice"),
    [(8, 0, "layout.micro_batch=4"), (9, 9, "layout.micro_batch=3"), (1, 1, "recipe.global_batch=2 and layout.micro_")],
)
def test_one_micro_batch_a_step_is_refused(batch: int, micro: int, advice: str) -> None:
    with pytest.raises(IllegalLayout) as caught:
        plan(batch, micro).check()
    text = str(caught.value)
    assert "recipe.noise_scale_every=5 needs at least two micro-batches" in text and advice in text
    assert "\n" not in text
    plan(batch, micro, every=0).check()


def test_two_are_enough_and_a_ramp_may_begin_with_one() -> None:
    plan(8, 4).check()
    plan(4, 4, (BatchStage(tokens=1000, global_batch=8),)).check()
    with pytest.raises(IllegalLayout, match=r"global_batch=8 is one: take layout\.micro_batch=4"):
        plan(4, 8, (BatchStage(tokens=1000, global_batch=8),)).check()


@pytest.mark.parametrize(("batch", "micro"), [(8, 0), (9, 9), (15, 0), (7, 7)])
def test_the_advice_is_legal(batch: int, micro: int) -> None:
    refused = plan(batch, micro)
    with pytest.raises(IllegalLayout) as caught:
        refused.check()
    advised = int(str(caught.value).split("layout.micro_batch=")[1].split(",")[0])
    plan(batch, advised).check()
