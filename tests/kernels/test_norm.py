"""RMSNorm against fp64, whatever the strides; LayerNorm on a CPU in 16 bit."""

from functools import partial

import pytest
import torch
from torch import Tensor

from meshwright.kernels import fast, reference
from meshwright.kernels.norm import norms
from tests.counting import saved_bytes
from tests.kernels.exactness import LOW, assert_not_worse, assert_single, tensors

EPS = 1e-5


def exact(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("lead", [(1,), (7,), (2, 5), (2, 5, 3)], ids=str)
@pytest.mark.parametrize("width", [1, 8, 33])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e4])
@pytest.mark.parametrize("name", ["fast", "reference"])
def test_value_and_gradients(lead: tuple[int, ...], width: int, size: float, name: str) -> None:
    """`size`: from rows that vanish beside epsilon to large ones."""
    rms_norm = (fast() if name == "fast" else reference()).rms_norm
    x, weight = tensors((*lead, width), (width,))
    bound = 1e-6 if width > 1 else 1e-5
    assert_single(
        lambda x, weight: rms_norm(x * size, weight, EPS), lambda x, weight: exact(x * size, weight), [x, weight], bound
    )


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_16_bit_is_no_further_from_fp64_than_plain_code(dtype: torch.dtype) -> None:
    inputs = tensors((3, 20, 64), (64,), dtype=dtype)
    plain = partial(reference().rms_norm, eps=EPS)
    assert_not_worse(partial(fast().rms_norm, eps=EPS), plain, exact, inputs)


def test_first_derivatives_in_fp64() -> None:
    inputs = [tensor.double().requires_grad_() for tensor in tensors((2, 3, 8), (8,))]
    assert torch.autograd.gradcheck(lambda x, weight: norms._RmsNorm.apply(x, weight, EPS), inputs)
    assert torch.autograd.gradcheck(lambda x, weight: fast().rms_norm(x, weight, EPS), inputs)


@pytest.mark.parametrize("kind", ["transposed", "part", "expanded"])
def test_inputs_and_gradients_may_be_views(kind: str) -> None:
    def view(x: Tensor) -> Tensor:
        if kind == "transposed":
            return x.transpose(0, 1)
        return x.split((8, 4), dim=-1)[0] if kind == "part" else x[:, :1].expand(-1, 5, -1)

    def run(function: object, x: Tensor, weight: Tensor) -> Tensor:
        assert callable(function)
        out = function(view(x), weight, EPS)
        return out.transpose(0, 1) if kind == "transposed" else out

    width = 12 if kind == "part" else 8
    inputs = tensors((3, 5, width), (8,))
    assert_single(partial(run, fast().rms_norm), partial(run, exact), inputs)


def test_a_row_of_zeros_stays_zero_and_its_gradient_finite() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    out = fast().rms_norm(x, torch.ones(8), EPS)
    out.sum().backward()
    assert not out.any() and x.grad is not None and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_only_the_input_and_a_number_a_row_are_kept(dtype: torch.dtype) -> None:
    x, weight = (tensor.requires_grad_() for tensor in tensors((50, 64), (64,), dtype=dtype))
    _, saved = saved_bytes(lambda: fast().rms_norm(x, weight, EPS), without=[x, weight])
    assert saved == 50 * 4


def test_a_sum_over_many_rows_keeps_its_digits() -> None:
    """The gradient of the weight at 4,099 rows: in one order it would be 6 times as far off as here."""
    x, weight, gradient = tensors((4099, 24), (24,), (4099, 24))
    leaf = weight.requires_grad_()
    (actual,) = torch.autograd.grad(fast().rms_norm(x, leaf, EPS), leaf, gradient)
    wide = weight.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(exact(x.double(), wide), wide, gradient.double())
    assert (actual.double() - right).norm() / right.norm() < 2.5e-7


def exact_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("lead", [(3, 20), (1000,)], ids=str)
def test_layer_norm_in_16_bit_is_no_further_from_fp64_than_plain_code(
    dtype: torch.dtype, lead: tuple[int, ...]
) -> None:
    """torch's own backward pass sums over 1,000 rows of bf16 in bf16: 4 % off."""
    inputs = tensors((*lead, 64), (64,), (64,), dtype=dtype)
    plain = partial(reference().layer_norm, eps=EPS)
    assert_not_worse(partial(fast().layer_norm, eps=EPS), plain, exact_layer_norm, inputs)


def test_layer_norm_makes_only_the_gradients_that_are_wanted() -> None:
    x, weight, bias = tensors((6, 8), (8,), (8,), dtype=torch.bfloat16)
    (actual,) = torch.autograd.grad(fast().layer_norm(x, weight, bias.requires_grad_(), EPS).sum(), bias)
    assert torch.equal(actual, torch.full_like(bias, 6.0))
