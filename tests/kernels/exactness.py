"""Whether a fast kernel is as exact as plain code of the same dtype, both measured against fp64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[..., Tensor]

LOW = (torch.bfloat16, torch.float16)
SINGLE = 1e-6
"""Largest relative error of an fp32 kernel (Euclidean norm over a tensor): a few roundings."""
SLACK = 1.02
"""What chance may add to the error of a 16-bit kernel beside that of plain code."""


def tensors(*sizes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Normal numbers that `dtype` can hold, so that an fp64 copy holds the very same."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator).to(dtype) for size in sizes]


def outcome(function: Function, inputs: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    """Value and the gradient of every input, for a random gradient of the value; all fp64."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    value = function(*leaves)
    seeds = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    found = torch.autograd.grad(value, leaves, seeds.to(value.dtype))
    for gradient, leaf in zip(found, leaves, strict=True):
        assert gradient.shape == leaf.shape and gradient.dtype == leaf.dtype
    return [tensor.detach().double() for tensor in (value, *found)]


def errors(function: Function, exact: Function, inputs: Sequence[Tensor]) -> list[float]:
    """Relative errors of value and gradients (to 0.3 an element where they are nearly 0), against fp64."""
    right = outcome(exact, [tensor.double() for tensor in inputs])
    return [_error(a, b) for a, b in zip(outcome(function, inputs), right, strict=True)]


def _error(found: Tensor, right: Tensor) -> float:
    assert found.shape == right.shape and torch.isfinite(right).all()
    return ((found - right).norm() / right.norm().clamp(min=0.3 * max(1, right.numel()) ** 0.5)).item()


def assert_single(function: Function, exact: Function, inputs: Sequence[Tensor], bound: float = SINGLE) -> None:
    """An fp32 kernel is exact to a few roundings, in value and gradients."""
    found = errors(function, exact, inputs)
    assert max(found) < bound, found


def assert_not_worse(function: Function, plain: Function, exact: Function, inputs: Sequence[Tensor]) -> None:
    """A 16-bit kernel is no further from fp64 than plain code of that dtype; in no output, and neither is broken."""
    fast, slow = errors(function, exact, inputs), errors(plain, exact, inputs)
    assert all(a <= SLACK * b + 1e-6 for a, b in zip(fast, slow, strict=True)), (fast, slow)
    assert max(slow) < 0.05, slow
