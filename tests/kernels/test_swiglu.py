"""silu(gate) * up against fp64."""

import pytest
import torch
from torch import Tensor

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
    given = tensors((40, 64), (40, 64), dtype=dtype)
    assert_not_worse(fast().swiglu, reference().swiglu, exact, given)


def test_first_derivatives_in_fp64() -> None:
    given = [tensor.double().requires_grad_() for tensor in tensors((3, 5), (3, 5))]
    assert torch.autograd.gradcheck(fast().swiglu, given)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradient_that_is_wanted(frozen: int) -> None:
    pair = [tensor.requires_grad_(index != frozen) for index, tensor in enumerate(tensors((3, 5), (3, 5)))]
    fast().swiglu(*pair).sum().backward()
    assert pair[frozen].grad is None and pair[1 - frozen].grad is not None


def test_the_activation_is_not_kept() -> None:
    pair = [tensor.requires_grad_() for tensor in tensors((30, 50), (30, 50))]
    assert saved_bytes(lambda: fast().swiglu(*pair), without=pair)[1] == 0
    assert saved_bytes(lambda: reference().swiglu(*pair), without=pair)[1] == 30 * 50 * 4
