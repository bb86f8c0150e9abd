"""Scales of inputs and cut ranges against slow twins, and the edges of both."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.compress.calibrated_methods import LEAST, SHARES, clipped_scales, group_products
from meshwright.compress.input_scales import EXPONENTS, awq_scales, smooth_scales
from meshwright.compress.layer_inputs import InputStatistics
from meshwright.kernels.quantized.matrix import assembled, nearest
from meshwright.kernels.quantized.quantize import quantize_matrix, scales_of
from meshwright.kernels.quantized.rounding import absmax
from meshwright.spec.errors import PlanError
from meshwright.spec.model.quantization_schemes import SCHEMES

AWQ, INT8 = SCHEMES["int4-awq"], SCHEMES["int8-smooth"]


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def inputs(rows: int = 300, columns: int = 64, strong: float = 30.0) -> Tensor:
    """Some of which are much stronger than the others."""
    x = numbers(rows, columns, seed=1)
    x[:, [5, 40]] *= strong
    return x


def tied(strength: Tensor) -> Tensor:
    return strength


def output_error(weight: Tensor, scales: Tensor, x: Tensor) -> float:
    """|x (W - W' / s)^T|^2 of W' = round(W s)."""
    rounded = quantize_matrix("some", weight * scales, AWQ).dequantized() / scales
    return float((x @ (rounded - weight).t()).square().sum())


def test_awq_takes_the_exponent_with_the_smallest_error_of_all_readers() -> None:
    weights, x = [numbers(16, 64) * 0.1, numbers(8, 64, seed=2) * 0.3], inputs()
    actual = awq_scales(weights, x.t() @ x / len(x), x.abs().mean(0), [AWQ, AWQ], tied)
    errors = {}
    for index in range(EXPONENTS):
        scales = x.abs().mean(0) ** (index / EXPONENTS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        errors[index] = sum(output_error(weight, scales, x) for weight in weights), scales
    least = min(errors, key=lambda index: errors[index][0])
    assert least > 0 and torch.allclose(actual, errors[least][1], rtol=1e-5)
    assert errors[least][0] < 0.7 * errors[0][0], "strong inputs are rounded finer"


def test_inputs_of_equal_strength_are_hardly_scaled_and_dead_ones_stay_finite() -> None:
    weight, x = numbers(16, 64) * 0.1, inputs(strong=1.0)
    x[:, 3] = 0.0
    scales = awq_scales([weight], x.t() @ x / len(x), x.abs().mean(0), [AWQ], tied)
    assert scales.isfinite().all() and (scales > 0).all()
    assert output_error(weight, scales, x) <= output_error(weight, torch.ones(64), x) * 1.001
    peaks = smooth_scales([weight], x.abs().amax(0), x, [INT8], tied)
    assert peaks.isfinite().all() and (peaks > 0).all()


def test_smoothquant_moves_outliers_until_activations_fit_8_bits() -> None:
    weight, x = numbers(16, 64) * 0.1, inputs(strong=300.0)
    scales = smooth_scales([weight], x.abs().amax(0), x, [INT8], tied)

    def error(s: Tensor) -> float:
        wide, narrow = absmax(x / s, 8, "row").restored(), absmax(weight * s, 8, "row").restored()
        return float((wide @ narrow.t() - x @ weight.t()).square().mean())

    assert error(scales) < 0.1 * error(torch.ones(64))
    assert scales[5] > 5 * scales.median() and scales[40] > 5 * scales.median()


def test_inputs_that_have_one_scale_together_are_given_one() -> None:
    weight, x = numbers(16, 64) * 0.1, inputs()

    def pairs(strength: Tensor) -> Tensor:
        return strength.view(2, 2, 16).amax(1, keepdim=True).expand(2, 2, 16).flatten()

    for actual in (
        awq_scales([weight], x.t() @ x / len(x), x.abs().mean(0), [AWQ], pairs),
        smooth_scales([weight], x.abs().amax(0), x, [INT8], pairs),
    ):
        assert torch.equal(actual.view(2, 2, 16)[:, 0], actual.view(2, 2, 16)[:, 1])


@pytest.mark.parametrize("scheme", [AWQ, replace(AWQ, zeros="fixed")], ids=["zeros", "no zeros"])
def test_ranges_are_cut_where_the_error_is_least(scheme: object) -> None:
    assert isinstance(scheme, type(AWQ))
    weight, x = numbers(4, 70) * 0.1, inputs(columns=70)
    weight[1, 7] = 2.0
    gram = x.t() @ x / len(x)
    scales, zeros = scales_of(weight, scheme)
    actual = clipped_scales(weight, gram, scheme, scales, zeros)
    shares = [1 - (1 - LEAST) * index / SHARES for index in range(SHARES)]
    for row in range(4):
        for group, start in enumerate(range(0, 70, 32)):
            ours = slice(start, min(start + 32, 70))
            errors = []
            for share in shares:
                tried = scales.clone()
                tried[row, group] = (scales[row, group].float() * share).to(scales.dtype)
                codes = nearest(scheme, weight, tried, zeros)
                wrong = (assembled(scheme, codes, tried, zeros).dequantized() - weight)[row, ours].double()
                errors.append((float(wrong @ gram[ours, ours].double() @ wrong), float(tried[row, group])))
            least = min(errors)
            taken = [error for error, scale in errors if scale == float(actual[row, group])]
            assert taken and min(taken) <= least[0] * 1.0001
    assert (actual <= scales).all() and (actual < scales).any()


def test_products_of_groups_are_the_blocks_on_the_diagonal() -> None:
    gram = numbers(70, 70)
    actual = group_products(gram, 32)
    assert torch.equal(actual[0], gram[:32, :32]) and torch.equal(actual[1], gram[32:64, 32:64])
    assert torch.equal(actual[2, :6, :6], gram[64:, 64:]) and not actual[2, 6:].any()


def test_statistics_are_sums_over_batches() -> None:
    input_statistics, parts = InputStatistics("some", "products"), [numbers(5, 8), numbers(9, 8, seed=3)]
    for part in parts:
        input_statistics.add(part)
    whole = torch.cat(parts)
    assert input_statistics.rows == 14 and torch.allclose(input_statistics.gram, whole.t() @ whole / 14, atol=1e-6)
    assert torch.equal(input_statistics.peaks, whole.abs().amax(0)) and torch.allclose(
        input_statistics.mean, whole.abs().mean(0)
    )
    sampled = InputStatistics("some", "sample")
    for _ in range(20):
        sampled.add(numbers(100, 8))
    assert 100 < len(sampled.sampled_rows) <= 256
    with pytest.raises(PlanError, match="some reads activations that are infinite or NaN"):
        input_statistics.add(torch.full((1, 8), float("inf")))
