"""silu(gate) * up against fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels import fast, reference
from tests.counting import saved_bytes
from tests.kernels.exactness import LOW, assert_not_worse, assert_single, tensors


def exact(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


@pytest.mark.parametrize("name", ["fast", "reference"])
@pytest.mark.parametrize("size", [(1, 1), (3, 5, 7), (0, 4)], ids=str)
def test_value_and_gradients(name: str, size: tuple[int, ...]) -> None:
    swiglu = (fast() if name == "fast" else reference()).swiglu
    assert_single(lambda gate, up: swiglu(8 * gate, up), lambda gate, up: exact(8 * gate, up), tensors(size, size))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_16_bit_is_no_further_from_fp64_than_plain_code(dtype: torch.dtype) -> None:
    inputs = tensors((40, 64), (40, 64), dtype=dtype)
    assert_not_worse(fast().swiglu, reference().swiglu, exact, inputs)


def test_first_derivatives_in_fp64() -> None:
    inputs = [tensor.double().requires_grad_() for tensor in tensors((3, 5), (3, 5))]
    assert torch.autograd.gradcheck(fast().swiglu, inputs)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradient_that_is_wanted(frozen: int) -> None:
    pair = [tensor.requires_grad_(index != frozen) for index, tensor in enumerate(tensors((3, 5), (3, 5)))]
    fast().swiglu(*pair).sum().backward()
    assert pair[frozen].grad is None and pair[1 - frozen].grad is not None


def test_the_activation_is_not_kept() -> None:
    pair = [tensor.requires_grad_() for tensor in tensors((30, 50), (30, 50))]
    assert saved_bytes(lambda: fast().swiglu(*pair), without=pair)[1] == 0
    assert saved_bytes(lambda: reference().swiglu(*pair), without=pair)[1] == 30 * 50 * 4


def exact_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return exact(gate, up) @ weight.T + bias


def without_bias(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return fast().swiglu_linear(gate, up, weight) + bias


@pytest.mark.parametrize("lead", [(), (1,), (6,), (2, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("form", [fast().swiglu_linear, reference().swiglu_linear, without_bias])
def test_the_second_half_of_a_gated_mlp(lead: tuple[int, ...], form: Callable[..., Tensor]) -> None:
    assert_single(form, exact_linear, tensors((*lead, 9), (*lead, 9), (5, 9), (5,)))


def test_its_first_derivatives_in_fp64() -> None:
    inputs = [tensor.double().requires_grad_() for tensor in tensors((2, 3, 7), (2, 3, 7), (4, 7), (4,))]
    assert torch.autograd.gradcheck(fast().swiglu_linear, inputs)
    assert torch.autograd.gradcheck(fast().swiglu_linear, inputs[:3])


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_in_16_bit_it_is_no_further_from_fp64_than_plain_code(dtype: torch.dtype) -> None:
    inputs = tensors((40, 64), (40, 64), (32, 64), (32,), dtype=dtype)
    assert_not_worse(fast().swiglu_linear, reference().swiglu_linear, exact_linear, inputs)


@pytest.mark.parametrize("frozen", [2, 3])
def test_a_frozen_weight_gets_no_gradient(frozen: int) -> None:
    inputs = [t.requires_grad_(i != frozen) for i, t in enumerate(tensors((6, 9), (6, 9), (5, 9), (5,)))]
    fast().swiglu_linear(*inputs).sum().backward()
    assert [tensor.grad is None for tensor in inputs] == [index == frozen for index in range(4)]


def test_its_inputs_may_be_views() -> None:
    def halves(both: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return *both.transpose(0, 1).chunk(2, dim=-1), weight, bias

    inputs = tensors((3, 4, 18), (5, 9), (5,))
    assert_single(lambda *x: fast().swiglu_linear(*halves(*x)), lambda *x: exact_linear(*halves(*x)), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("native", [False, True], ids=["widened", "native"])
def test_the_product_in_between_is_not_kept(dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: native)
    inputs = [tensor.requires_grad_() for tensor in tensors((30, 50), (30, 50), (8, 50), (8,), dtype=dtype)]
    assert saved_bytes(lambda: fast().swiglu_linear(*inputs), without=inputs)[1] == 0
    assert saved_bytes(lambda: reference().swiglu_linear(*inputs), without=inputs)[1] == 2 * 30 * 50 * dtype.itemsize


@pytest.mark.parametrize("wanted", range(1, 16))
def test_any_of_the_inputs_alone_may_want_a_gradient(wanted: int) -> None:
    """Frozen weights and inputs; a bias alone."""
    made = [torch.randn(3, 6), torch.randn(3, 6), torch.randn(4, 6), torch.randn(4)]
    gradients = []
    for form in (fast().swiglu_linear, reference().swiglu_linear):
        inputs = [x.clone().requires_grad_(bool(wanted >> index & 1)) for index, x in enumerate(made)]
        form(*inputs).square().sum().backward()
        gradients.append([x.grad for x in inputs])
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
