"""Compiled loops against their twins in torch, and products with prepared matrices against plain ones."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.attention import rope
from meshwright.kernels.attention.paged import PagedStore, RowsCall, attend_rows
from meshwright.kernels.c import build, serving_library, training_rows
from meshwright.kernels.c.serving_library import Loops
from meshwright.kernels.linear import swiglu
from meshwright.kernels.norm import norms
from meshwright.kernels.quantized import prepared_product
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.prepared_product import Int8Product, int8_product
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.kernels.quantized.quantized_linear import row_codes
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.plan.execution import CacheForm
from tests.kernels.references import attend_rows_reference
from tests.kernels.stored_numbers import stored

ROWS = (1, 2, 3, 5, 16, 33)


@pytest.fixture
def loops() -> Loops:
    actual = serving_library.compiled()
    assert actual is not None, "the tests need a C compiler"
    return actual


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def drawn(*size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 48, 100])
def test_norms(loops: Loops, rows: int, width: int) -> None:
    x, added, weight = drawn(1, rows, width), drawn(1, rows, width, seed=1), drawn(width, seed=2)
    with serving_library.used(loops):
        assert torch.allclose(norms.rms_norm(x, weight, 1e-5), norms.rms_norm_reference(x, weight, 1e-5), atol=1e-5)
        actual, total = norms.add_rms_norm(x, added, weight, 1e-5)
    right, sums = norms.add_rms_norm_reference(x, added, weight, 1e-5)
    assert torch.equal(total, sums) and torch.allclose(actual, right, atol=1e-5)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("apart", [0, 16])
def test_rotation_of_parts_of_one_product(loops: Loops, in_place: bool, apart: int) -> None:
    both, angles = drawn(1, 5, 6 * 16 + apart), drawn(1, 5, 1, 8)
    q, k = both[..., :64].unflatten(-1, (4, 16)), both[..., 64 + apart :].unflatten(-1, (2, 16))
    right = rope.rotate_pair_reference(q, k, angles.cos(), angles.sin())
    with serving_library.used(loops):
        actual = rope.rotate_pair(q, k, angles.cos(), angles.sin(), in_place=in_place)
    assert (actual[0].data_ptr() == both.data_ptr()) == in_place
    for a, b in zip(actual, right, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_swiglu_over_its_whole_range(loops: Loops) -> None:
    both = torch.cat((torch.linspace(-120, 120, 999).expand(3, -1), drawn(3, 999)), dim=1)
    gate, up = both.split(999, dim=1)
    with serving_library.used(loops):
        actual = swiglu.swiglu(gate, up)
    assert torch.allclose(actual, swiglu.swiglu_reference(gate, up), rtol=1e-6, atol=1e-30)
    assert actual.isfinite().all()


def test_what_is_no_number_stays_none(loops: Loops) -> None:
    x = drawn(3, 64)
    x[1, 5], x[2, 6] = torch.nan, torch.inf
    _, scales = loops.round_rows(x)
    assert scales.isfinite()[:, 0].tolist() == [True, False, False]
    with serving_library.used(loops):
        for actual in (swiglu.swiglu(x, x), norms.rms_norm(x, torch.ones(64), 1e-5), int8_product(drawn(64, 64))(x)):
            assert actual[0].isfinite().all() and not actual[1].isfinite().all() and not actual[2].isfinite().all()


def test_gradients_are_those_of_torch(loops: Loops) -> None:
    x = drawn(2, 8).requires_grad_()
    with torch.enable_grad(), serving_library.used(loops):
        norms.rms_norm(x, torch.ones(8), 1e-5).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(("heads", "key_heads", "width", "values"), [(6, 2, 64, 64), (4, 1, 128, 128), (3, 3, 24, 16)])
@pytest.mark.parametrize("window", [0, 5])
def test_attention_of_rows(loops: Loops, heads: int, key_heads: int, width: int, values: int, window: int) -> None:
    keys = drawn(9, 4, key_heads, width, seed=1)
    saved = keys if values == width else drawn(9, 4, key_heads, width, seed=2)
    call = RowsCall(
        torch.tensor([8, 3, 1, 5, 0]), torch.tensor([0, 0, 0, 3, 3]), torch.tensor([0, 6, 11, 7, 2]), longest=12
    )
    q = drawn(5, heads, width, seed=3)
    inputs = {"width": values, "window": window, "scale": 0.3}
    stores = stored(keys), stored(saved)
    actual = attend_rows(loops, q, *stores, call, **inputs)
    assert actual.shape == (5, heads, values)
    assert torch.allclose(actual, attend_rows_reference(q, keys, saved, call, **inputs), atol=1e-5)
    alone = RowsCall(call.tables, call.offsets[2:3], call.last[2:3], longest=12)
    assert torch.equal(actual[2:3], attend_rows(loops, q[2:3], *stores, alone, **inputs))


def coded(scheme: str, rows: int, columns: int = 128, seed: int = 0) -> QuantizedMatrix:
    return quantize_matrix("w", drawn(rows, columns, seed=seed), SCHEMES[scheme])


@pytest.mark.parametrize("scheme", ["plain", "int8", "int4-sym", "nf4"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("with_loops", [False, True])
@pytest.mark.parametrize("sizes", [(20, 8), (32, 16)])
def test_prepared_products(loops: Loops, scheme: str, bias: bool, with_loops: bool, sizes: tuple[int, int]) -> None:
    matrices = [drawn(n, 128, seed=n) if scheme == "plain" else coded(scheme, n, seed=n) for n in sizes]
    biases = [drawn(sizes[0]) if bias else None, None]
    product = prepared_product.prepared_product(matrices, biases)
    assert product is not None
    for rows in ROWS:
        x = drawn(rows, 128, seed=rows)
        with serving_library.used(loops if with_loops else None):
            actual = product(x)
        assert torch.allclose(actual, prepared_product.reference(matrices, biases, x), rtol=1e-4, atol=1e-3)


def test_rows_of_floats_do_not_depend_on_others(loops: Loops) -> None:
    product, x = prepared_product.prepared_product([drawn(48, 100)], [drawn(48)]), drawn(70, 100)
    assert isinstance(product, prepared_product.PanelProduct)
    with serving_library.used(loops):
        actual = product(x[:64])
        for rows in ROWS:
            assert torch.equal(product(x[:rows]), actual[:rows])
        assert torch.allclose(product(x)[:64], actual, atol=1e-4), "torch's own, for more rows"


@pytest.mark.parametrize("product", [prepared_product.OnednnProduct, prepared_product.TransposedProduct])
def test_products_without_loops(product: Any) -> None:
    weight, bias, x = drawn(20, 128), drawn(20), drawn(5, 128)
    assert torch.allclose(product(weight, bias)(x), F.linear(x, weight, bias), atol=1e-4)


def test_int8_rows_do_not_depend_on_others_nor_on_the_library(loops: Loops) -> None:
    matrix, x = coded("int8", 48), drawn(33, 128)
    product = prepared_product.prepared_product([matrix], [None])
    assert isinstance(product, Int8Product)
    with serving_library.used(loops):
        actual = product(x)
        for rows in ROWS:
            assert torch.equal(product(x[:rows]), actual[:rows])
    assert torch.equal(product(x), actual)
    codes, scales = row_codes(x)
    exact = (codes.double() @ matrix.codes.double().t()).float() * matrix.scales.float().view(-1) * scales
    assert torch.equal(actual, exact)


def test_columns_that_are_kept(loops: Loops) -> None:
    columns = torch.tensor([3, 77], dtype=torch.int32)
    weight, x = drawn(16, 128), drawn(5, 128)
    x[:, 3] *= 50
    matrix = quantize_matrix("w", weight, SCHEMES["llm-int8"], columns, torch.float32)
    product = prepared_product.prepared_product([matrix], [None])
    assert isinstance(product, Int8Product)
    assert product.panels is None, "they are no part of the panels"
    with serving_library.used(loops):
        actual = product(x)
    assert torch.allclose(actual, prepared_product.reference([matrix], [None], x), atol=1e-3)
    assert (actual - F.linear(x, weight)).abs().max() < (int8_product(weight)(x) - F.linear(x, weight)).abs().max()


def test_what_is_not_prepared() -> None:
    mixed = [drawn(8, 128), coded("int8", 8)]
    assert prepared_product.prepared_product(mixed, [None, None]) is None
    first, second = (
        quantize_matrix(
            "w", drawn(8, 128), SCHEMES["llm-int8"], torch.tensor([tensor], dtype=torch.int32), torch.float32
        )
        for tensor in (1, 2)
    )
    assert prepared_product.prepared_product([first, second], [None, None]) is None, "they leave out other columns"


def test_a_bf16_model_is_multiplied_in_fp32_where_the_cpu_has_no_units() -> None:
    weight, x = drawn(8, 128).bfloat16(), drawn(3, 128).bfloat16()
    product = prepared_product.TransposedProduct(weight.float(), None)
    assert product(x).dtype == torch.bfloat16
    assert torch.allclose(product(x).float(), F.linear(x.float(), weight.float()), rtol=1e-2, atol=1e-1)


def test_numbers_are_kept_where_torch_keeps_them(loops: Loops) -> None:
    both, slots = drawn(7, 2 * 24 + 5), torch.tensor([3, 0, 11, 5, 6, 7, 8])
    numbers = both[:, 5:].unflatten(1, (2, 24))
    stores = PagedStore((3, 4, 2, 24), numbers, "model"), PagedStore((3, 4, 2, 24), numbers, "model")
    stores[0].write(slots, numbers)
    stores[1].write(slots, numbers, loops)
    assert torch.equal(stores[0].codes, stores[1].codes)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_attention_over_codes(loops: Loops, form: CacheForm) -> None:
    """As over the numbers that they stand for; which are near those that were kept."""
    keys, values = drawn(6, 4, 2, 64, seed=1, scale=3.0), drawn(6, 4, 2, 64, seed=2)
    stores = stored(keys, form), stored(values, form)
    restored = [store.read(slice(0, 6)) for store in stores]
    for tensor, numbers in zip(restored, (keys, values), strict=True):
        peak = numbers.abs().amax(-1, keepdim=True)
        assert ((tensor - numbers).abs() / peak).max() < (0.5 / 127 + 1e-6 if form == "int8" else 0.04)
    call = RowsCall(torch.tensor([5, 0, 3]), torch.tensor([0, 1]), torch.tensor([9, 3]), longest=10)
    q, inputs = drawn(2, 4, 64, seed=3), {"width": 64, "window": 0, "scale": 0.1}
    actual = attend_rows(loops, q, *stores, call, **inputs)
    assert torch.allclose(actual, attend_rows_reference(q, *restored, call, **inputs), atol=1e-5)
    assert 4 * sum(store.bytes for store in stores) < 1.1 * sum(tensor.nbytes for tensor in (keys, values)) * (
        1 + 4 / 64
    )


def test_codes_are_the_same_by_both_libraries(loops: Loops) -> None:
    numbers, slots = drawn(7, 2, 24, scale=5.0), torch.tensor([3, 0, 11, 5, 6, 7, 8])
    numbers[2, 1] = 0
    by_torch, by_loops = (PagedStore((3, 4, 2, 24), numbers, "int8") for _ in range(2))
    by_torch.write(slots, numbers)
    by_loops.write(slots, numbers, loops)
    for a, b in zip(by_torch.tensors, by_loops.tensors, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(by_loops.read(torch.tensor([2, 0])), by_loops.read(slice(0, 3))[[2, 0]])


def test_a_compiler_without_threads_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Apple's clang: loops on one thread would be slower than torch's operations on all of them."""
    named = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    single = tmp_path / "cc"
    single.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp\\ *) exit 1;; esac\nexec {named} "$@"\n')
    single.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(single),))
    assert training_rows._library.__wrapped__() is None
    assert build.load(*serving_library.STEPS) is not None, "the loops of serving run on one thread too"
