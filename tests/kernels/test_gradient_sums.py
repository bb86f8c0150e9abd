"""Sums of gradients that are wider than these: as autograd's own, and without a wide copy of a gradient."""

import torch
from torch import Tensor, nn

from meshwright.kernels.linear.linear import linear
from meshwright.kernels.linear.weight_gradients import (
    GradientSum,
    WeightGradients,
    add_into,
    gradient_dtype,
    splitting,
    sum_of,
    use_alias,
)
from meshwright.observe.profile.allocator import watching
from tests.kernels.exactness import tensors

BF16 = torch.bfloat16
SIZE = (1024, 2048)


def parameter(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(tensors(shape, dtype=BF16, seed=seed)[0])


def summed(parameter: nn.Parameter, *, meets: bool = False) -> GradientSum:
    return GradientSum(parameter, torch.float32, lambda: torch.empty_like(parameter, dtype=torch.float32), meets=meets)


def give(parameter: nn.Parameter, gradients: list[Tensor]) -> None:
    """As many backward passes."""
    for gradient in gradients:
        torch.autograd.backward(parameter.view_as(parameter), gradient)


def test_the_sum_is_that_of_autograd_bit_for_bit() -> None:
    gradients = list(tensors((7, 5), (7, 5), (7, 5), dtype=BF16, seed=1))
    plain, ours = parameter(7, 5), parameter(7, 5)
    plain.grad_dtype = torch.float32
    sums = summed(ours)
    give(plain, gradients)
    give(ours, gradients)
    assert plain.grad is not None and ours.grad is not None and torch.equal(ours.grad, plain.grad)
    assert gradient_dtype(ours) == torch.float32 and sum_of(ours) is sums and sum_of(plain) is None


def test_no_gradient_is_widened_as_a_whole() -> None:
    """By the allocator: autograd makes a copy of 8 MiB to add 4 MiB."""
    peaks = {}
    for has_sum in (False, True):
        weight = parameter(*SIZE)
        weight.grad_dtype = torch.float32
        sums = summed(weight) if has_sum else None
        first, second = tensors(SIZE, SIZE, dtype=BF16, seed=1)
        give(weight, [first])
        with watching() as actual:
            give(weight, [second])
        peaks[has_sum] = max((size for _, size in actual.totals()), default=0)
        del sums
    wide = 4 * SIZE[0] * SIZE[1]
    assert peaks[False] >= wide
    assert peaks[True] <= wide / 4


def test_pieces_add_up_to_the_whole() -> None:
    total, gradient = torch.randn(3, 2**18 + 5), torch.randn(3, 2**18 + 5).to(BF16)
    right = total + gradient.float()
    add_into(total, gradient)
    assert torch.equal(total, right)


def test_a_matrix_of_both_ends_gets_two_gradients_one_by_one() -> None:
    """Autograd would add them in 16 bits."""
    weight = parameter(4, 4)
    sums = summed(weight, meets=True)
    small = torch.full((4, 4), 2.0**-9, dtype=BF16)
    torch.autograd.backward((use_alias(weight).view(4, 4), weight.view(4, 4)), (torch.ones(4, 4, dtype=BF16), small))
    assert weight.grad is not None and bool((weight.grad == 1 + 2.0**-9).all()) and sums.meets


def test_gradients_of_weights_that_come_late_go_to_the_sum() -> None:
    weight = parameter(16, 8)
    sums = summed(weight)
    x = tensors((3, 8), dtype=BF16, seed=2)[0].requires_grad_()
    with splitting():
        for _ in range(2):
            made = linear(x, weight)
            with WeightGradients() as queue:
                made.sum().backward()
            queue.run()
    right = 2 * (torch.ones(3, 16, dtype=BF16).t() @ x.detach()).float()
    assert weight.grad is not None and weight.grad.dtype == sums.dtype
    torch.testing.assert_close(weight.grad, right)


def test_a_sum_goes_with_its_owner() -> None:
    weight = parameter(2, 2)
    sums = summed(weight)
    del sums
    assert sum_of(weight) is None and gradient_dtype(weight) == BF16
