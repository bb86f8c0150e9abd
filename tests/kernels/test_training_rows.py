"""Norms, rotation and the gate of an MLP in compiled loops, forward and backward, against plain code in fp64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.attention import rope
from meshwright.kernels.c import training_rows
from meshwright.kernels.linear import swiglu
from meshwright.kernels.linear.linear import linear_reference
from meshwright.kernels.norm import norms
from tests.kernels.exactness import Function, assert_not_worse, assert_single, tensors

pytestmark = pytest.mark.skipif(
    not training_rows.is_compiled(), reason="no C compiler that takes the loops of kernels/c"
)
EPS = 1e-5
SIZES = [(3, 16), (2, 5, 48), (70, 384), (1, 1008)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_rows, "LEAST", 0)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    request.addfinalizer(lambda: torch.set_num_threads(before))


def compare(run: Function, plain: Function, inputs: list[Tensor]) -> None:
    """In fp32 to a few roundings, in bf16 no worse than plain code."""
    if inputs[0].dtype == torch.float32:
        assert_single(run, plain, inputs)
    else:
        assert_not_worse(run, plain, plain, inputs)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def plain_gate(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rms_norm(size: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = tensors(size, size[-1:], dtype=dtype)
    with torch.no_grad():
        assert training_rows.takes(*inputs)
    compare(partial(norms.rms_norm, eps=EPS), plain_norm, inputs)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_swiglu(size: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(swiglu.swiglu, plain_gate, tensors(size, size, dtype=dtype))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_swiglu_and_the_product_behind_it(size: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = tensors(size, size, (24, size[-1]), dtype=dtype)
    compare(swiglu.swiglu_linear, lambda g, u, w: linear_reference(plain_gate(g, u), w), inputs)


def tables(rows: int, positions: int, half: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(rows, positions, 1, half, generator=torch.Generator().manual_seed(3)) * 6
    return angles.cos(), angles.sin()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own_tables", [False, True], ids=["one table", "a table a row"])
@pytest.mark.parametrize("half", [16, 32, 48])
def test_rotation(half: int, own_tables: bool, dtype: torch.dtype) -> None:
    """Of a view as well: heads side by side in what a product made."""
    cos, sin = tables(3 if own_tables else 1, 7, half)

    def turned(x: Tensor, by: Function) -> Tensor:
        actual: Tensor = by(
            x[..., 8:].unflatten(2, (2, 2 * half)), cos.to(x.dtype) if x.dtype == torch.float64 else cos, sin
        )
        return actual

    inputs = tensors((3, 7, 8 + 4 * half), dtype=dtype)
    compare(partial(turned, by=rope.rotate), partial(turned, by=rope.rotate_reference), inputs)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 40.0, 1e4, 1e18])
def test_extreme_inputs_are_as_torch_has_them(size: float) -> None:
    gate, up = (x * size for x in tensors((4, 64), (4, 64)))
    torch.testing.assert_close(training_rows.swiglu(gate, up), torch.nn.functional.silu(gate) * up)
    weight = torch.ones(64)
    torch.testing.assert_close(
        training_rows.rms_norm(gate, weight, EPS)[0], norms.rms_norm_reference(gate, weight, EPS)
    )


def test_what_is_no_number_stays_in_its_row() -> None:
    x, weight = tensors((4, 32), (32,))
    x[1, 3] = float("nan")
    for actual in (training_rows.rms_norm(x, weight, EPS)[0], training_rows.swiglu(x, x)):
        assert actual[1, 3].isnan() and torch.isfinite(actual[[0, 2, 3]]).all()
    narrow = training_rows.swiglu(x.bfloat16(), x.bfloat16())
    assert narrow[1, 3].isnan() and torch.isfinite(narrow[[0, 2, 3]]).all()


def test_no_bit_depends_on_the_number_of_threads() -> None:
    x, weight, gradient = tensors((200, 64), (64,), (200, 64))
    actual, before = [], torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        out, scales = training_rows.rms_norm(x, weight, EPS)
        actual.append((out, *training_rows.rms_norm_gradients(gradient, x, weight, scales)))
    torch.set_num_threads(before)
    assert all(a.equal(b) for other in actual[1:] for a, b in zip(actual[0], other, strict=True))


def test_fake_tensors_have_the_same_sizes() -> None:
    x, weight = tensors((4, 5, 32), (32,))
    real = training_rows.rms_norm(x, weight, EPS)
    with compat.fake_tensors():
        fake = training_rows.rms_norm(torch.empty(4, 5, 32), torch.empty(32), EPS)
    assert [(tensor.shape, tensor.dtype) for tensor in fake] == [(tensor.shape, tensor.dtype) for tensor in real]


def test_second_derivatives_are_those_of_torch_or_refused() -> None:
    """The loops have no graph: their gradients of gradients would be 0 without a word."""
    x, weight = tensors((8, 32), (32,))

    def again(function: Function, inputs: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.requires_grad_() for tensor in inputs]
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        actual = torch.autograd.grad(sum(tensor.square().sum() for tensor in first), leaves)  # type: ignore[arg-type]
        return list(actual)

    wanted = again(plain_norm, [x.double(), weight.double()])
    actual = again(partial(norms.rms_norm, eps=EPS), [x, weight])
    for tensor, right in zip(actual, wanted, strict=True):
        torch.testing.assert_close(tensor.double(), right, rtol=1e-3, atol=1e-3)
    for refused, inputs in ((swiglu.swiglu_linear, tensors((8, 32), (8, 32), (4, 32))), (rope.rotate, rotated())):
        with pytest.raises(RuntimeError, match=r"differentiation|not implemented"):
            again(lambda tensor, *rest, run=refused: run(tensor, *rest), inputs)


def rotated() -> list[Tensor]:
    return [*tensors((1, 7, 2, 32)), *tables(1, 7, 16)]


def test_what_does_not_fit_each_other_is_left_to_torch() -> None:
    """C would read what lies behind it."""
    x, short = tensors((4, 32), (1, 32))
    cos, sin = tables(1, 1, 16)
    (q,) = tensors((1, 7, 2, 32))
    with torch.no_grad():
        assert not training_rows.takes(x, short) and not training_rows.takes_tables(q, cos, sin)
        assert swiglu.swiglu(x, short).allclose(plain_gate(x, short))
        assert rope.rotate(q, cos, sin).allclose(rope.rotate_reference(q, cos, sin))


@pytest.mark.parametrize("case", ["fp16", "mixed", "odd", "small"])
def test_what_they_do_not_take(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = tensors((4, 24 if case == "odd" else 32), (32,))
    if case == "small":
        monkeypatch.setattr(training_rows, "LEAST", 129)
    x = x.half() if case == "fp16" else x
    with torch.no_grad():
        assert not training_rows.takes(x, weight.bfloat16() if case == "mixed" else weight.to(x.dtype))
