"""Whether a fast kernel is as exact as plain code of the same dtype, both measured against fp64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.kernels.norm.dropout import AttentionDropout

Function = Callable[..., Tensor]

LOW = (torch.bfloat16, torch.float16)
SINGLE = 1e-6
"""Largest relative error of an fp32 kernel (Euclidean norm over a tensor): a few roundings."""
SLACK = 1.02
"""What chance may add to the error of a 16-bit kernel beside that of plain code."""
FUSED_ATTENTION = 2.0
"""The same of torch's fused attention where a CPU multiplies 16-bit numbers: like every flash kernel it rounds the
softmax weights to 16 bits before the product with the values, and again when the backward pass makes them anew.
Measured: 0.5 to 0.6 times plain code for the result and the gradient of queries, up to 1.3 for keys and values."""
BLOCKS_OF_16_BITS = 1.15
"""The same of the blockwise form there, which makes scores and weights as plain code does, but rounds the part that
each block of queries adds to the gradients of keys and values. Measured: 0.93 to 1.07."""


def tensors(*sizes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Normal numbers that `dtype` can hold, so that an fp64 copy holds the very same."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator).to(dtype) for size in sizes]


def outcome(function: Function, inputs: Sequence[Tensor], seed: int | None = 1) -> list[Tensor]:
    """Value and the gradient of every input, for a random gradient of the value (None = for ones); all fp64."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    value = function(*leaves)
    seeds = torch.ones(value.shape)
    if seed is not None:
        seeds = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    actual = torch.autograd.grad(value, leaves, seeds.to(value.dtype))
    for gradient, leaf in zip(actual, leaves, strict=True):
        assert gradient.shape == leaf.shape and gradient.dtype == leaf.dtype
    return [tensor.detach().double() for tensor in (value, *actual)]


def errors(function: Function, exact: Function, inputs: Sequence[Tensor], seed: int | None = 1) -> list[float]:
    """Relative errors of value and gradients (to 0.3 an element where they are nearly 0), against fp64."""
    right = outcome(exact, [tensor.double() for tensor in inputs], seed)
    return [_error(a, b) for a, b in zip(outcome(function, inputs, seed), right, strict=True)]


def _error(actual: Tensor, right: Tensor) -> float:
    assert actual.shape == right.shape and torch.isfinite(right).all()
    return ((actual - right).norm() / right.norm().clamp(min=0.3 * max(1, right.numel()) ** 0.5)).item()


def assert_single(function: Function, exact: Function, inputs: Sequence[Tensor], bound: float = SINGLE) -> None:
    """An fp32 kernel is exact to a few roundings, in value and gradients."""
    actual = errors(function, exact, inputs)
    assert max(actual) < bound, actual


def assert_not_worse(
    function: Function,
    plain: Function,
    exact: Function,
    inputs: Sequence[Tensor],
    bars: Sequence[float] = (),
    seed: int | None = 1,
) -> None:
    """A 16-bit kernel is no further from fp64 than `bars` (default: SLACK) times plain code of that dtype, output by
    output, and neither is broken."""
    fast, slow = errors(function, exact, inputs, seed), errors(plain, exact, inputs, seed)
    limits = bars or [SLACK] * len(slow)
    assert all(a <= bar * b + 1e-6 for a, b, bar in zip(fast, slow, limits, strict=True)), (fast, slow)
    assert max(slow) < 0.05, slow


def plain_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Head by head, in the dtype it is given: q (B, S, H, E), k (B, T, K, E), v (B, T, K, V), seen (B or 1, S, T)."""
    group = q.shape[2] // k.shape[2]
    heads = []
    for h in range(q.shape[2]):
        scores = (q[:, :, h] @ k[:, :, h // group].mT) * scale
        heads.append(scores.where(seen, -torch.inf).softmax(-1) @ v[:, :, h // group])
    return torch.stack(heads, 2)


def drops(q: Tensor, rate: float, seed: int = 0) -> AttentionDropout | None:
    """Dropout of the weights of queries (B, S, H, E) with keys of a seed. None at rate 0."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**31), 2**31, q.shape[:3], generator=generator).to(torch.int32)
    return AttentionDropout(rate, keys) if rate else None
