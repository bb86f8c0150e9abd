"""Products with quantized matrices in the interpreter: the same operands as restored ones, any size, sums to fp32's
rounding; whole numbers equal to the bit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.kernels.linear.fp8 import narrow, narrow_columns
from meshwright.kernels.quantized import device_products
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.kernels.quantized.quantized_linear import quantized_linears, quantized_linears_reference
from meshwright.kernels.triton import int8_product, packed_product, row_rounding
from meshwright.kernels.triton.code_words import PackedMatrix
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme
from tests.kernels.interpreted.poison import nothing_is_left_unwritten  # noqa: F401  # a fixture

FP16, BF16 = torch.float16, torch.bfloat16
PACKED = [name for name, scheme in SCHEMES.items() if scheme.bits == 4 or scheme.codes == "e4m3"]
SIZES = [(1, 1, 1), (3, 70, 71), (2, 33, 300), (17, 130, 129), (5, 64, 2048), (1, 30, 1536), (2, 9, 1024)]
"""Rows, outputs, inputs: no multiple of anything, short last groups, odd inputs, K long enough to be cut, and one and
two rows of whole words."""


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + sum(size)))


def made(scheme: Scheme, outputs: int, inputs: int, columns: list[int] | None = None) -> QuantizedMatrix:
    outlier_columns = None if columns is None else torch.tensor(columns, dtype=torch.int32)
    actual = quantize_matrix("some", numbers(outputs, inputs) * 0.1, scheme, outlier_columns, FP16)
    return replace(actual, prefer="triton")


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    actual = x.double() @ weight.double().t()
    return actual if bias is None else actual + bias.double()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_codes_in_the_product(name: str, size: tuple[int, int, int]) -> None:
    """The operands are those of the restored matrix in 16 bit; the sum is fp32's, rounded once."""
    rows, outputs, inputs = size
    matrix, bias = made(SCHEMES[name], outputs, inputs), numbers(outputs).to(FP16)
    x = numbers(rows, 2 * inputs).to(FP16)[:, inputs:]
    actual = device_products.packed(x, matrix, bias, {})
    assert actual is not None and actual.dtype == FP16
    right = exact(x, replace(matrix, prefer="eager", prepared={}).restored(FP16), bias)
    assert (actual.double() - right).abs().max() <= 2**-11 * right.abs().max() * 1.01


@pytest.mark.parametrize("group", [0, 32, 64, 128, 256])
@pytest.mark.parametrize("zeros", ["fixed", "whole", "real"])
@pytest.mark.parametrize("rows", [1, 150])
def test_groups_and_zeros(group: int, zeros: str, rows: int) -> None:
    """All tiles, with rows of two blocks of outputs and more."""
    method = "absmax" if zeros == "fixed" else "zero-point"
    scheme = Scheme(name="x", about="", bits=4, group=group, zeros=zeros, method=method)  # type: ignore[arg-type]  # words
    matrix, x = made(scheme, 140, 411), numbers(rows, 411).to(FP16)
    actual = device_products.packed(x, matrix, None, {})
    assert actual is not None
    right = exact(x, replace(matrix, prefer="eager", prepared={}).restored(FP16), None)
    assert (actual.double() - right).abs().max() <= 2**-11 * right.abs().max() * 1.01


@pytest.mark.parametrize("size", [(1, 20, 512), (2, 13, 77)], ids=str)
def test_fp8_of_few_rows_is_the_product_of_rounded_rows(size: tuple[int, int, int]) -> None:
    rows, outputs, inputs = size
    matrix, bias, x = made(SCHEMES["fp8"], outputs, inputs), numbers(outputs).to(FP16), numbers(rows, inputs).to(FP16)
    rounded = row_rounding.rounded(x, FP16)
    assert torch.equal(rounded.codes.float() * rounded.scales, narrow(x).wide())
    actual = packed_product.few_rows_linear(rounded.codes, matrix.packed(), bias, rounded.scales)
    right = exact(narrow(x).wide(), matrix.dequantized(), bias)
    assert (actual.double() - right).abs().max() <= 2**-11 * right.abs().max() * 1.01


def test_what_the_kernel_cannot_take_is_restored() -> None:
    for scheme in (SCHEMES["int3"], replace(SCHEMES["int4-rtn"], group=16)):
        matrix, x = made(scheme, 20, 64), numbers(3, 64).to(FP16)
        assert device_products.fusion_obstacle(matrix)
        actual = quantized_linears(x, [matrix], [None])[0]
        assert (actual.double() - exact(x, matrix.dequantized(), None)).norm() < 2e-3 * actual.double().norm()


def test_every_number_of_e4m3() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    weight = codes.view(torch.float8_e4m3fn).view(-1, 1)
    matrix = PackedMatrix(weight, torch.ones(len(codes), 1), None, None, 1, 0)
    actual = packed_product.packed_linear(torch.ones(1, 1, dtype=FP16), matrix, None)
    assert torch.equal(actual[0], weight[:, 0].half())


@pytest.mark.parametrize(("name", "bias"), [("int4-rtn", False), ("int4-hqq", True), ("nf4", False)])
def test_many_rows_are_multiplied_with_slabs(monkeypatch: pytest.MonkeyPatch, name: str, bias: bool) -> None:
    monkeypatch.setattr(device_products, "SLAB_BYTES", 2 * 128 * 96)
    monkeypatch.setattr(device_products, "FUSED_ROWS", 100)
    matrix, x = made(SCHEMES[name], 150, 96), numbers(130, 96).to(FP16)
    assert device_products.slab_rows(150, 96, 2) == 128
    bias_tensor = numbers(150).to(FP16) if bias else None
    y = quantized_linears(x, [matrix], [bias_tensor])[0]
    right = exact(x, matrix.restored(FP16), bias_tensor)
    assert (y.double() - right).norm() < 1e-3 * right.norm()
    assert not any(key.startswith("torch.") for key in matrix.prepared), "no copy stays"


@pytest.mark.parametrize("dtype", [torch.float32, FP16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["int8", "llm-int8"])
def test_int8(name: str, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, outputs, inputs = size
    columns = sorted({0, inputs // 2}) if name == "llm-int8" else None
    matrices = [made(SCHEMES[name], outputs, inputs, columns) for _ in range(2)]
    biases = [numbers(outputs).to(dtype), None]
    x = (numbers(rows, inputs) * 3).to(dtype)
    actual = quantized_linears(x, matrices, biases)
    for tensor, right in zip(actual, quantized_linears_reference(x, matrices, biases), strict=True):
        assert tensor.dtype == dtype
        if dtype == FP16 and columns is None and right.isfinite().all():
            assert (tensor != right).double().mean() <= 0.02, (
                "fp32 products in another order round otherwise now and then"
            )
        torch.testing.assert_close(tensor, right, rtol=2**-10 if dtype == FP16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["int8", "llm-int8"])
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    """Nor on how K is cut: to the bit."""
    matrix = made(SCHEMES[name], 70, 1152, [5, 900] if name == "llm-int8" else None)
    x = numbers(70, 1152).to(FP16)
    whole = quantized_linears(x, [matrix], [None])[0]
    cuts = {
        packed_product.parts_of(rows, 70, 1152, int8_product.tile_of(rows, 70, 4), 4)
        for rows in (1, 20, 70)
    }  # fmt: skip
    assert len(cuts) > 1
    for rows in (1, 2, 20):
        assert torch.equal(quantized_linears(x[:rows], [matrix], [None])[0], whole[:rows])


def test_a_threshold_in_the_batch() -> None:
    matrix, x = made(replace(SCHEMES["llm-int8"], outliers="threshold"), 48, 64), numbers(8, 64)
    x[2, 11] = 500.0
    actual, right = (f(x, [matrix], [None])[0] for f in (quantized_linears, quantized_linears_reference))
    torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("width", [1, 77, 5000])
def test_rows_are_rounded_as_plain_code_does(width: int) -> None:
    x = numbers(6, width)
    x[1], x[2] = 0.0, x[2] * 1e-20
    x[3] = torch.round(x[3] * 8) / 8  # ties
    x[4] *= 2.0 ** -torch.arange(width).fmod(20)  # codes below 2^-6 have fewer bits
    ours, plain = narrow(x, "triton"), narrow(x)
    assert torch.equal(ours.scales, plain.scales)
    assert torch.equal(ours.values.view(torch.uint8), plain.values.view(torch.uint8))


@pytest.mark.parametrize("size", [(1, 1), (5, 70), (700, 33), (64, 64), (2, 90, 41)], ids=str)
def test_columns_are_rounded_as_plain_code_does(size: tuple[int, ...]) -> None:
    """Turned, with zeros up to a multiple of 16; of a stack, and of rows that are put apart."""
    x = numbers(*size)
    x[..., 0] = 0.0
    x *= 2.0 ** -torch.arange(size[-2]).fmod(20).unsqueeze(-1)
    ours, plain = narrow(x.mT, "triton"), narrow(x.mT)
    assert torch.equal(ours.scales, plain.scales)
    assert torch.equal(ours.values.view(torch.uint8), plain.values.view(torch.uint8))
    if len(size) == 2:
        ours, plain = narrow_columns(x, "triton"), narrow_columns(x)
        assert torch.equal(ours.scales, plain.scales) and torch.equal(ours.wide(), plain.wide())
        places = 3 * torch.arange(size[0]) + 1
        apart = row_rounding.turned(x, 3 * size[0] + 5, places)
        wide = apart.codes.float() * apart.scales
        assert torch.equal(wide[:, places], plain.wide()[:, : size[0]])
        assert wide.count_nonzero() == wide[:, places].count_nonzero()


def test_a_column_that_is_not_finite_spoils_no_other() -> None:
    x = numbers(40, 20)
    x[33, 7] = float("nan")
    ours = narrow(x.t(), "triton")
    assert ours.scales[7].isnan().all() and ours.scales.isnan().sum() == 1
    assert ours.wide().isnan().any(1).nonzero().flatten().tolist() == [7]


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")
def test_what_is_not_finite_is_not_hidden() -> None:
    matrix = made(SCHEMES["int8"], 20, 40)
    for bad in (float("nan"), float("inf")):
        x = numbers(3, 40)
        x[1, 7] = bad
        actual = quantized_linears(x, [matrix], [None])[0]
        assert not actual[1].isfinite().any() and actual[[0, 2]].isfinite().all()


def test_bf16_by_way_of_fp32() -> None:
    """The interpreter multiplies no bf16; the kernels widen it there."""
    for name in ("int4-rtn", "nf4", "llm-int8"):
        matrix = made(SCHEMES[name], 40, 96, [3] if name == "llm-int8" else None)
        x = numbers(4, 96).to(BF16)
        actual = quantized_linears(x, [matrix], [None])[0]
        right = quantized_linears_reference(x, [matrix], [None])[0]
        assert (actual.double() - right.double()).norm() < 0.01 * right.double().norm()


def test_gradients_of_x_and_bias() -> None:
    """Those of the restored matrix; the bias learns beside an x that does not."""
    matrix, gradient = made(SCHEMES["nf4"], 40, 96), numbers(3, 40).to(FP16)
    x, bias = numbers(3, 96).to(FP16).requires_grad_(), numbers(40).to(FP16).requires_grad_()
    quantized_linears(x, [matrix], [bias])[0].backward(gradient)
    assert x.grad is not None and bias.grad is not None
    right = gradient.double() @ matrix.dequantized().double()
    assert (x.grad.double() - right).norm() < 2e-3 * right.norm()
    alone = torch.autograd.grad(quantized_linears(x.detach(), [matrix], [bias])[0], bias, gradient)[0]
    assert torch.equal(alone, bias.grad)


def test_the_same_inputs_give_the_same_bits() -> None:
    matrix, x = made(SCHEMES["int4-rtn"], 64, 2048), numbers(2, 2048).to(FP16)
    a, b = (quantized_linears(x, [matrix], [None])[0] for _ in range(2))
    assert torch.equal(a, b)
