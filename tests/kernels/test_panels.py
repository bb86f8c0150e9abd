"""Products with matrices in panels, against the same matrices as numbers."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.c import serving_library
from meshwright.kernels.c.serving_library import BF16, CODES, FLOATS, LANES, Loops, Panels, fits_bf16
from meshwright.kernels.quantized import prepared_product
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.prepared_product import CodeProduct
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.kernels.quantized.quantized_linear import quantized_linears
from meshwright.model.quantized_weights import QuantizedWeight
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme

ROWS = (1, 2, 3, 5, 8, 9, 33)
FEW_BITS = [
    *(SCHEMES[name] for name in ("int4-rtn", "int4-sym", "int4-hqq", "nf4", "nf4-double", "int3")),
    Scheme(name="2 bits", about="", bits=2, zeros="whole", group=16, method="zero-point"),
    Scheme(name="whole rows", about="", bits=4, zeros="real", group=0, method="zero-point"),
    Scheme(name="wide scales", about="", bits=4, group=32, scales="float32"),
]


@pytest.fixture
def loops() -> Loops:
    actual = serving_library.compiled()
    assert actual is not None, "the tests need a C compiler"
    return actual


@pytest.fixture
def coded(loops: Loops) -> Loops:
    if not loops.has_codes:
        pytest.skip("this CPU looks nothing up in a vector of sixteen numbers")
    return loops


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def product_of(*matrices: QuantizedMatrix, bias: Tensor | None = None) -> CodeProduct:
    actual = prepared_product.prepared_product(matrices, [bias, *[None] * (len(matrices) - 1)])
    assert isinstance(actual, CodeProduct) and actual.panels.kind == CODES
    return actual


@pytest.mark.parametrize("scheme", FEW_BITS, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 100), (80, 258)])
def test_codes(coded: Loops, scheme: Scheme, rows: int, columns: int) -> None:
    """Sizes of which a group, a tile of restored inputs and a pair of panels are no divisors."""
    matrix, bias = quantize_matrix("w", drawn(rows, columns), scheme), drawn(rows, seed=1)
    product, whole = product_of(matrix, bias=bias), matrix.dequantized()
    assert torch.equal(coded.restored(product.panels), whole)
    x = drawn(max(ROWS), columns, seed=2)
    right = F.linear(x.double(), whole.double(), bias.double())
    with serving_library.used(coded):
        actual = product(x)
        assert (actual - right).abs().max() <= 2e-6 * (x.abs().double() @ whole.abs().double().t()).max()
        for count in ROWS:
            assert torch.equal(product(x[:count]), actual[:count]), "a row's bits are its own"
    assert torch.allclose(product(x), actual, rtol=1e-4, atol=1e-4), "without loops, by restored numbers"


@pytest.mark.parametrize("scheme", FEW_BITS, ids=lambda scheme: scheme.name)
def test_codes_of_several_matrices_and_many_rows(coded: Loops, scheme: Scheme) -> None:
    matrices = [quantize_matrix("w", drawn(rows, 64, seed=rows), scheme) for rows in (32, 16, 20, 12)]
    product, x = product_of(*matrices), drawn(prepared_product.LOOKED_UP_ROWS + 1, 64)
    right = torch.cat([F.linear(x, matrix.dequantized()) for matrix in matrices], -1)
    for rows in (7, prepared_product.LOOKED_UP_ROWS + 1):
        with serving_library.used(coded):
            assert torch.allclose(product(x[:rows]), right[:rows], atol=1e-4)
    assert product.bytes == product.panels.bytes < right.shape[1] * 64 * (1.1 if scheme.group in (0, 128) else 1.6)


def test_codes_of_rows_that_are_no_numbers(coded: Loops) -> None:
    product, x = product_of(quantize_matrix("w", drawn(32, 64), SCHEMES["int4-rtn"])), drawn(4, 64)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    with serving_library.used(coded):
        actual = product(x)
    assert actual[1].isnan().all() and not actual[2].isfinite().any()
    assert actual[[0, 3]].isfinite().all()


def test_what_is_restored_once(coded: Loops) -> None:
    """A number of outputs that is no multiple of a panel's, an odd number of inputs, and more than four bits."""
    for rows, columns, name in ((24, 64, "int4-rtn"), (32, 63, "int4-rtn"), (32, 64, "fp8")):
        matrix = quantize_matrix("w", drawn(rows, columns), SCHEMES[name])
        product = prepared_product.prepared_product([matrix], [None])
        assert product is not None and not isinstance(product, CodeProduct)


@pytest.mark.parametrize("rows", [16, 48])
@pytest.mark.parametrize("width", [2, 100])
def test_numbers_that_were_stored_in_bf16(loops: Loops, rows: int, width: int) -> None:
    """Half of the bytes, the same bits."""
    weight, bias, x = drawn(rows, width).bfloat16().float(), drawn(rows, seed=1), drawn(33, width, seed=2)
    narrow = Panels.of_numbers(weight, bias)
    numbers = weight.view(-1, LANES, width).transpose(1, 2).contiguous()
    wide = Panels(kind=FLOATS, rows=rows, width=width, numbers=numbers, bias=bias)
    assert narrow is not None and narrow.kind == BF16 and 2 * narrow.bytes == wide.bytes
    for count in ROWS:
        assert torch.equal(loops.multiply(x[:count], narrow), loops.multiply(x[:count], wide))


def test_which_numbers_fit_bf16() -> None:
    weight = drawn(48, 64).bfloat16().float()
    weight[0, :4] = torch.tensor([0.0, -0.0, float("inf"), 2.0**-133])
    assert fits_bf16(weight)
    for other in (1 + 2.0**-9, float("nan"), 2.0**-140):
        changed = weight.clone()
        changed[-1, -1] = other
        assert not fits_bf16(changed)
        actual = Panels.of_numbers(changed)
        assert actual is not None and actual.kind == FLOATS
    odd = Panels.of_numbers(weight[:, :63].contiguous())
    assert odd is not None and odd.kind == FLOATS


@pytest.mark.parametrize("name", ["int4-rtn", "nf4-double", "int8", "llm-int8"])
@pytest.mark.parametrize("rows", [2, 64])
def test_matrices_are_copied_after_they_were_multiplied_with(name: str, rows: int) -> None:
    """What products made of them stays behind: a place in memory is none in a copy."""
    matrix, x = quantize_matrix("w", drawn(32, 64), SCHEMES[name]), drawn(rows, 64, seed=1)
    (right,) = quantized_linears(x, [matrix], [None])
    assert matrix.prepared
    other = copy.deepcopy(matrix)
    assert not other.prepared and torch.equal(other.codes, matrix.codes) and other.codes is not matrix.codes
    matrix.codes.zero_()
    del matrix
    assert torch.equal(quantized_linears(x, [other], [None])[0], right)


@pytest.mark.parametrize("name", ["int4-rtn", "nf4", "int8"])
@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("way", ["take", "load_state_dict"])
def test_what_products_made_ends_with_the_tensors_that_it_was_made_of(name: str, rows: int, way: str) -> None:
    first, second = (quantize_matrix("w", drawn(32, 64, seed=seed), SCHEMES[name]) for seed in (0, 1))
    weight, x = QuantizedWeight(SCHEMES[name], (32, 64), 0, torch.float32), drawn(rows, 64, seed=2)
    weight.take(first)
    assert torch.equal(quantized_linears(x, [weight.matrix], [None])[0], quantized_linears(x, [first], [None])[0])
    weight.take(second) if way == "take" else weight.load_state_dict(second.tensors)
    assert torch.equal(quantized_linears(x, [weight.matrix], [None])[0], quantized_linears(x, [second], [None])[0])
