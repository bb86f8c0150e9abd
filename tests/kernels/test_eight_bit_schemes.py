"""The 8-bit methods of table 1 of LLM.int8() (arXiv:2208.07339): numbers and products against numpy's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from meshwright.kernels.quantized.prepared_product import prepared_product
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.kernels.quantized.quantized_linear import (
    activation_codes,
    quantized_linears,
    quantized_linears_reference,
)
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme

COLUMNS = [5, 40]
METHODS = {
    "int8-tensor": ("all", "all", False), "int8-zeropoint": ("all", "all", True), "int8-row": ("all", "each", False),
    "int8": ("each", "each", False), "int8-vector-zeropoint": ("each", "each", True),
    "llm-int8-row": ("all", "each", False), "llm-int8": ("each", "each", False),
    "llm-int8-zeropoint": ("each", "each", True),
}  # fmt: skip
"""(rows of weights that share a scale, tokens that share one, zeros), as the paper's table names them."""


def exact(scheme: str, **changes: object) -> Scheme:
    """The scheme with scales in fp32, so that numpy needs no rounding to bf16."""
    return replace(SCHEMES[scheme], scales="float32", **changes)  # type: ignore[arg-type]  # fields


def sample(rows: int, inputs: int, seed: int) -> np.ndarray:
    """Numbers with a positive mean and one strong column, in fp32."""
    numbers = np.random.default_rng(seed).normal(0.3, 1.0, (rows, inputs))
    numbers[:, 5] *= 9
    return numbers.astype(np.float32)


def rounded(numbers: np.ndarray, share: str, zeros: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, S and Z by the definition, in fp64."""
    wide = numbers.astype(np.float64)
    axes = (0, 1) if share == "all" else 1
    if zeros:
        low, high = np.minimum(wide.min(axes, keepdims=True), 0), np.maximum(wide.max(axes, keepdims=True), 0)
        scale = (high - low) / 255
        zero = np.rint(-low / scale)
        return np.clip(np.rint(wide / scale) + zero, 0, 255), scale, zero
    scale = np.abs(wide).max(axes, keepdims=True) / 127
    return np.clip(np.rint(wide / scale), -127, 127), scale, np.zeros_like(scale)


@pytest.mark.parametrize("name", METHODS)
def test_weights_and_activations_are_rounded_as_the_definition_says(name: str) -> None:
    weights_share, tokens_share, zeros = METHODS[name]
    weight, x = sample(24, 64, 0), sample(7, 64, 1)
    matrix = quantize_matrix("some", torch.tensor(weight), exact(name, outliers="none"))
    codes, scale, zero = rounded(weight, weights_share, zeros)
    assert np.abs(matrix.whole_codes().numpy() - codes).max() <= 1  # a tie in fp32 may fall on the other side
    assert (matrix.whole_codes().numpy() != codes).mean() < 0.002
    assert np.allclose(matrix.scales.numpy(), scale, rtol=1e-6)
    assert np.array_equal(np.broadcast_to(matrix.every_zero().numpy(), (24, 1)), np.broadcast_to(zero, (24, 1)))
    restored = (matrix.whole_codes().numpy().astype(np.float64) - zero) * scale
    assert np.allclose(matrix.dequantized().numpy(), restored, atol=1e-5)
    codes_of_rows, scales_of_rows, zeros_of_rows = activation_codes(torch.tensor(x), exact(name))
    codes, scale, zero = rounded(x, tokens_share, zeros)
    assert (codes_of_rows.numpy() != codes).mean() < 0.005 and np.allclose(scales_of_rows.numpy(), scale, rtol=1e-6)
    assert (zeros_of_rows is None) == (not zeros)
    assert zeros_of_rows is None or np.array_equal(zeros_of_rows.numpy(), zero)


@pytest.mark.parametrize("outliers", ["none", "calibrated", "threshold"])
@pytest.mark.parametrize("zero_point", ["both", "weights", "activations", "neither"])
@pytest.mark.parametrize(("weight_share", "activation_share"), [
    ("tensor", "tensor"), ("tensor", "row"), ("row", "tensor"), ("row", "row"),
])  # fmt: skip
def test_products_are_sums_of_whole_numbers(
    weight_share: str, activation_share: str, zero_point: str, outliers: str
) -> None:
    """Every granularity with every zeros and every decomposition: int64 sums of numpy, and each way to multiply."""
    scheme = exact(
        "int8", weight_share=weight_share, activation_share=activation_share, outliers=outliers, threshold=6.0,
        zeros="whole" if zero_point in ("both", "weights") else "fixed",
        activation_zeros=zero_point in ("both", "activations"),
    )  # fmt: skip
    weight, x = torch.tensor(sample(24, 64, 0)), torch.tensor(sample(7, 64, 1))
    columns = torch.tensor(COLUMNS, dtype=torch.int32) if outliers == "calibrated" else None
    matrix = quantize_matrix("some", weight, scheme, columns, torch.float32)
    strong = COLUMNS if outliers == "calibrated" else sorted(set(np.nonzero(np.abs(x.numpy()) > 6.0)[1].tolist()))
    strong = [] if outliers == "none" else strong
    assert outliers == "none" or 0 < len(strong) < 8
    codes, scale, zero = activation_codes(x, scheme, torch.tensor(strong) if strong else None)
    left = codes.numpy().astype(np.int64) - (0 if zero is None else zero.numpy().astype(np.int64))
    right = matrix.whole_codes().numpy().astype(np.int64) - matrix.every_zero().numpy().astype(np.int64)
    assert not strong or np.all(left[:, strong] == 0)
    expected = (left @ right.T) * scale.numpy().astype(np.float64) * matrix.scales.numpy().astype(np.float64).T
    plain = weight.numpy() if outliers == "calibrated" else matrix.dequantized().numpy()
    expected = expected + x.numpy()[:, strong].astype(np.float64) @ plain[:, strong].astype(np.float64).T
    for product in (quantized_linears, quantized_linears_reference):
        assert np.allclose(product(x, [matrix], [None])[0].numpy(), expected, rtol=1e-6, atol=2e-5)
    prepared = prepared_product([matrix], [None])
    assert (prepared is not None) == (scheme.symmetric_by_token and outliers != "threshold")
    if prepared is not None:
        assert np.allclose(prepared(x).numpy(), expected, rtol=1e-6, atol=2e-5)


def test_a_scale_of_all_tokens_depends_on_the_neighbours_and_one_of_a_token_does_not() -> None:
    weight, x = torch.tensor(sample(24, 64, 0)), torch.tensor(sample(9, 64, 1))
    x[8] *= 50
    for name in METHODS:
        matrix = quantize_matrix("some", weight, exact(name, outliers="none"))
        alone, among = (quantized_linears(rows, [matrix], [None])[0][:8] for rows in (x[:8], x))
        assert torch.equal(alone, among) == (SCHEMES[name].activation_share == "row"), name


def test_zeros_halve_the_step_of_one_sided_numbers() -> None:
    """Zero-point beats absmax because outliers are one-sided: all 256 codes cover the one side."""
    x, weight = torch.tensor(np.abs(sample(16, 64, 1))), torch.tensor(np.abs(sample(8, 64, 2)))
    exact_outputs = x.double() @ weight.double().t()

    def error(name: str) -> float:
        matrix = quantize_matrix("some", weight, exact(name))
        return float((quantized_linears(x, [matrix], [None])[0] - exact_outputs).norm() / exact_outputs.norm())

    steps = [
        float(quantize_matrix("some", weight, exact(name)).scales[0]) for name in ("int8-tensor", "int8-zeropoint")
    ]
    assert steps[1] / steps[0] == pytest.approx(127 / 255, rel=1e-6)
    assert error("int8-zeropoint") < 0.7 * error("int8-tensor")


def test_bytes_of_a_matrix_are_those_that_are_stored() -> None:
    """One byte a weight, a bf16 scale for each output, and with zeros one more byte for each."""
    for name in METHODS:
        matrix = quantize_matrix("some", torch.tensor(sample(24, 64, 0)), SCHEMES[name])
        expected = 24 * 64 + 2 * 24 + (24 if METHODS[name][2] else 0)
        assert SCHEMES[name].nbytes((24, 64)) == expected
        assert sum(tensor.nbytes for tensor in matrix.tensors.values()) == expected
