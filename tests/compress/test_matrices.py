"""Matrices as codes: every scheme on awkward sizes, and the products with them."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.kernels.quantized import matrix as quantized_matrix
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix, relative_error
from meshwright.kernels.quantized.quantized_linear import (
    quantized_expert_linear,
    quantized_linears,
    quantized_linears_reference,
)
from meshwright.kernels.quantized.rounding import absmax, zero_point
from meshwright.spec.errors import PlanError
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme
from tests.counting import Alive

WORST = {
    "int8": 0.01,
    "llm-int8": 0.01,
    "int8-tensor": 0.015,
    "int8-zeropoint": 0.015,
    "int8-row": 0.015,
    "int8-vector-zeropoint": 0.01,
    "llm-int8-row": 0.015,
    "llm-int8-zeropoint": 0.01,
    "fp8": 0.03,
    "int4-rtn": 0.1,
    "int4-sym": 0.15,
    "int4-hqq": 0.1,
    "nf4": 0.1,
    "nf4-double": 0.1,
    "int3": 0.2,
    "int8-smooth": 0.01,
    "int4-gptq": 0.1,
    "int4-awq": 0.1,
    "int4-awq-gptq": 0.1,
    "int3-gptq": 0.2,
}
"""Relative errors of normal weights that no scheme may pass."""


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def made(name: str, weight: Tensor, **changes: object) -> QuantizedMatrix:
    return quantize_matrix("some", weight, replace(SCHEMES[name], **changes))  # type: ignore[arg-type]  # fields


@pytest.mark.parametrize("size", [(24, 64), (5, 45), (3, 7, 70)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_takes_every_size(name: str, size: tuple[int, ...]) -> None:
    weight = numbers(*size) * 0.05
    matrix = made(name, weight)
    assert relative_error(weight, matrix) < WORST[name]
    *stack, rows, columns = size
    planned = SCHEMES[name].sizes(rows, columns, stack)
    assert {part: (tuple(tensor.shape), str(tensor.dtype)) for part, tensor in matrix.tensors.items()} == {
        part: (dims, f"torch.{kind}") for part, (dims, kind) in planned.items()
    }


@pytest.mark.parametrize("size", [(64, 96), (3, 64, 96)], ids=str)
@pytest.mark.parametrize("name", ["int4-hqq", "nf4-double", "int8", "int3"])
def test_errors_are_found_some_rows_at_a_time(
    name: str, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the whole, in less memory than the matrix has in fp32."""
    weight = numbers(*size)
    matrix = made(name, weight)
    right = float((weight - matrix.dequantized()).norm() / weight.norm())
    matrix.prepared.clear()
    monkeypatch.setattr(quantized_matrix, "PIECE", weight.numel() // 16)
    with Alive([weight, *matrix.tensors.values(), *matrix.tables.values()]) as alive:
        assert relative_error(weight, matrix) == pytest.approx(right, rel=1e-6)
    assert alive.peak_bytes < weight.nbytes


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_of_zeros_and_constants_are_exact_and_nan_is_refused(name: str) -> None:
    weight = numbers(4, 70)
    weight[0], weight[1] = 0.0, 0.5
    restored = made(name, weight).dequantized()
    assert restored.isfinite().all() and restored[0].abs().max() < 1e-3
    if SCHEMES[name].weight_share == "tensor":
        step = float((weight.amax() - weight.amin()) / 127)  # one of a row is larger than the numbers of another
        assert float((restored[1] - weight[1]).abs().max()) <= step / 2
    else:
        coded_scale = 0.007 * 3 / 0.5  # half a step of the table, of the largest scale
        assert torch.allclose(restored[1], weight[1], rtol=coded_scale if name == "nf4-double" else 0.01)
    for bad in (math.nan, math.inf):
        weight[2, 3] = bad
        with pytest.raises(PlanError, match="some cannot be quantized: 1 of its weights are infinite or NaN"):
            made(name, weight)
    assert made(name, torch.full((2, 33), 1e-42)).dequantized().isfinite().all()


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("nf4", {"bits": 3}, "nf4 has 4"), ("fp8", {"bits": 6}, "e4m3 8"), ("int4-rtn", {"bits": 7}, "one of 2, 3"),
        ("int8", {"group": 32}, "group=0"), ("int4-rtn", {"group": 48}, "group=48"),
        ("fp8", {"zeros": "whole"}, "zeros=whole"), ("int4-sym", {"weight_share": "tensor"}, "activations=int8"),
        ("fp8", {"activation_zeros": True}, "activations=int8"),
        ("int4-rtn", {"scales": "double"}, "are for nf4"), ("nf4", {"method": "gptq"}, "whole numbers"),
        ("int4-sym", {"method": "smooth"}, "activations=int8"), ("llm-int8", {"threshold": 0.0}, "above 0"),
    ],
)  # fmt: skip
def test_a_scheme_that_cannot_be_is_refused(name: str, changes: dict[str, object], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        replace(SCHEMES[name], **changes)  # type: ignore[arg-type]  # fields


@pytest.mark.parametrize("size", [1e-36, 1e-38, 1e-40])
@pytest.mark.parametrize("name", SCHEMES)
def test_rows_that_decayed_to_almost_nothing_spoil_no_weight(name: str, size: float) -> None:
    """1 over a scale below 3e-39 is infinite."""
    weight = numbers(6, 70)
    weight[2] *= size
    restored = made(name, weight).dequantized()
    assert restored.isfinite().all() and restored[2].abs().max() < (0.1 if name == "nf4-double" else 8 * size)


@pytest.mark.parametrize(
    ("name", "size", "changes"), [("int4-rtn", 1e6, {"scales": "float16"}), ("nf4-double", 3e37, {})]
)
def test_weights_beyond_what_scales_can_say_are_refused(name: str, size: float, changes: dict[str, object]) -> None:
    weight = numbers(64, 256)
    weight[3:60] *= size
    with pytest.raises(
        PlanError, match=r"some has weights that are too large for scales in (fp32|float16): take format"
    ):
        made(name, weight, **changes)


def test_zeros_coarsen_no_other_scale_that_is_a_code() -> None:
    """Codes of scales are relative to the largest of their run."""
    weight = numbers(64, 256) * 0.02
    alone = relative_error(weight, made("nf4-double", weight))
    weight[::4] = 0.0
    matrix = made("nf4-double", weight)
    assert not matrix.dequantized()[::4].any()
    assert relative_error(weight, matrix) < 1.02 * alone


def test_a_matrix_is_what_the_plain_functions_say() -> None:
    """Scales in fp32 take the rounding of scales away."""
    weight = numbers(6, 70)
    int8 = made("int8", weight, scales="float32")
    plain = absmax(weight, 8, "row")
    assert torch.equal(int8.codes.int(), plain.codes) and torch.equal(int8.dequantized(), plain.restored())
    int4 = made("int4-rtn", weight, scales="float32")
    same = zero_point(weight, 4, 32)
    assert torch.equal(int4.whole_codes().int(), same.codes) and torch.equal(int4.every_zero(), same.zero)
    assert torch.equal(int4.dequantized(), same.restored())


def test_columns_that_are_kept_are_exact_and_out_of_the_scales() -> None:
    weight, columns = numbers(6, 40), torch.tensor([3, 17], dtype=torch.int32)
    weight[:, 17] *= 1000
    matrix = quantize_matrix("some", weight, SCHEMES["llm-int8"], columns, torch.float32)
    assert torch.equal(matrix.dequantized()[:, columns.long()], weight[:, columns.long()])
    assert float(matrix.scales.max()) < 0.1


def test_real_zeros_of_hqq_lose_less_than_whole_ones() -> None:
    weight = numbers(64, 256) * 0.05
    errors = [relative_error(weight, made("int4-hqq", weight, **zeros)) for zeros in ({}, WHOLE)]
    assert errors[0] < 0.95 * errors[1]


WHOLE = {"method": "zero-point", "zeros": "whole"}


def parts(kind: Scheme, seed: int = 0, columns: list[int] | None = None) -> QuantizedMatrix:
    stored = None if columns is None else torch.tensor(columns, dtype=torch.int32)
    return quantize_matrix("some", numbers(48, 64, seed=seed), kind, stored, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("name", SCHEMES)
def test_products_are_those_of_the_twin(name: str, rows: int, dtype: torch.dtype) -> None:
    columns = [[5, 9], [5, 9], [7]] if name == "llm-int8" else [None] * 3
    matrices = [parts(SCHEMES[name], seed, column) for seed, column in enumerate(columns)]
    biases = [numbers(48, seed=9).to(dtype), None, None]
    x = (numbers(2, rows, 64) * 3).to(dtype)
    fast, slow = (product(x, matrices, biases) for product in (quantized_linears, quantized_linears_reference))
    for left, right in zip(fast, slow, strict=True):
        assert left.dtype == dtype and left.shape == (2, rows, 48)
        off = float((left.float() - right.float()).norm() / right.float().norm())
        narrow = dtype == torch.bfloat16 or (rows * 2 <= 24 and SCHEMES[name].bits == 4)  # rounded to bf16 for it
        assert off < (0.01 if narrow else 1e-6)


@pytest.mark.parametrize("outliers", ["none", "calibrated"])
def test_int8_rows_do_not_depend_on_their_neighbours(outliers: str) -> None:
    """Bit for bit; with a threshold in the batch they do, as in the paper."""
    kind = replace(SCHEMES["llm-int8"], outliers=outliers)  # type: ignore[arg-type]  # one of its words
    matrix = parts(kind, columns=None if outliers == "none" else [5, 9])
    x = numbers(64, 64) * 4
    whole = quantized_linears(x, [matrix], [None])[0]
    for size in (1, 2, 5, 33):
        part = quantized_linears(x[:size], [matrix], [None])[0]
        assert torch.equal(part, whole[:size])


def test_a_threshold_in_the_batch_takes_columns_out() -> None:
    kind = replace(SCHEMES["llm-int8"], outliers="threshold")
    matrix, x = parts(kind), numbers(8, 64)
    x[2, 11] = 500.0
    actual = quantized_linears(x, [matrix], [None])[0]
    assert torch.allclose(actual, quantized_linears_reference(x, [matrix], [None])[0], rtol=1e-5, atol=1e-4)
    exact = x @ matrix.dequantized().t()
    plain = quantized_linears(x, [parts(replace(kind, outliers="none"))], [None])[0]
    assert float((actual - exact).norm()) < 0.2 * float((plain - exact).norm())


@pytest.mark.parametrize("name", ["int8", "int4-rtn"])
def test_gradients_are_those_of_the_restored_weights(name: str) -> None:
    matrices, x = [parts(SCHEMES[name], seed) for seed in (0, 1)], numbers(6, 64).requires_grad_()
    actual = quantized_linears(x, matrices, [None, None])
    sum((entry * numbers(6, 48, seed=5)).sum() for entry in actual).backward()  # type: ignore[union-attr]  # no int: there are two
    expected = sum(numbers(6, 48, seed=5) @ matrix.dequantized() for matrix in matrices)
    assert x.grad is not None and torch.allclose(x.grad, torch.as_tensor(expected), rtol=1e-5, atol=1e-5)


def test_a_bias_learns_where_its_input_does_not() -> None:
    bias = numbers(48).requires_grad_()
    quantized_linears(numbers(6, 64), [parts(SCHEMES["int4-rtn"])], [bias])[0].sum().backward()
    assert bias.grad is not None and torch.equal(bias.grad, torch.full((48,), 6.0))


def test_rows_go_to_their_experts() -> None:
    stack = quantize_matrix("some", numbers(3, 16, 64), SCHEMES["int4-rtn"])
    rows, counts = numbers(10, 64), [4, 0, 6]
    actual = quantized_expert_linear(rows, stack, counts)
    expected = torch.cat([rows[:4] @ stack.dequantized()[0].t(), rows[4:] @ stack.dequantized()[2].t()])
    assert torch.allclose(actual, expected, rtol=0.05, atol=0.2)
    assert quantized_expert_linear(rows[:0], stack, [0, 0, 0]).shape == (0, 16)
