"""Runs of rows times matrices of experts: against a plain loop in fp64, with experts that nobody visits."""

from functools import partial

import pytest
import torch
from torch import Tensor

from meshwright.kernels import fast, reference
from tests.counting import Operations
from tests.kernels.exactness import LOW, assert_not_worse, assert_single, outcome, tensors

COUNTS = {
    "even": [2, 2, 2, 2],
    "uneven": [1, 5, 0, 2],
    "first-and-last-empty": [0, 3, 5, 0],
    "all-to-one": [0, 0, 8, 0],
}


def loop(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return torch.stack([weights[expert] @ row for expert, row in zip(owners, rows, strict=True)])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", ["fast", "reference"])
def test_value_and_gradients(counts: list[int], name: str) -> None:
    product = partial((fast() if name == "fast" else reference()).expert_linear, counts=counts)
    assert_single(product, partial(loop, counts=counts), tensors((8, 6), (4, 5, 6)))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_first_derivatives_in_fp64(counts: list[int]) -> None:
    given = [tensor.double().requires_grad_() for tensor in tensors((8, 3), (4, 2, 3))]
    assert torch.autograd.gradcheck(partial(fast().expert_linear, counts=counts), given)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_16_bit_is_no_further_from_fp64_than_plain_code(dtype: torch.dtype) -> None:
    counts = [11, 0, 40, 13]
    plain = partial(reference().expert_linear, counts=counts)
    given = tensors((64, 48), (4, 32, 48), dtype=dtype)
    assert_not_worse(partial(fast().expert_linear, counts=counts), plain, partial(loop, counts=counts), given)


@pytest.mark.parametrize("name", ["fast", "reference"])
def test_no_rows_at_all(name: str) -> None:
    """A rank may be left without tokens; its weights then get a gradient of zero, not none."""
    product = (fast() if name == "fast" else reference()).expert_linear
    rows, weights = (tensor.requires_grad_() for tensor in tensors((0, 6), (4, 5, 6)))
    out = product(rows, weights, [0, 0, 0, 0])
    assert out.shape == (0, 5)
    out.sum().backward()
    assert weights.grad is not None and not weights.grad.any()
    assert rows.grad is not None and rows.grad.shape == (0, 6)


def test_an_expert_without_rows_gets_a_gradient_of_zero_even_where_its_weights_are_broken() -> None:
    rows, weights = tensors((8, 6), (4, 5, 6))
    weights[2] = torch.nan
    value, _, gradient = outcome(partial(fast().expert_linear, counts=[3, 4, 0, 1]), [rows, weights])
    assert torch.isfinite(value).all() and not gradient[2].any() and torch.isfinite(gradient).all()


def test_the_gradient_of_the_stack_is_written_once() -> None:
    """Not a whole stack of zeros for every expert: with X experts that would be X times the memory traffic."""
    rows, weights = (tensor.requires_grad_() for tensor in tensors((64, 6), (32, 5, 6)))
    out = fast().expert_linear(rows, weights, [2] * 32)
    with Operations() as made:
        out.sum().backward()
    stacks = [shape for shape in made.shapes if torch.Size(shape).numel() == weights.numel()]
    assert len(stacks) <= 4, "the stack itself, and views of it"
