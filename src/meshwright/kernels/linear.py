"""x W^T + b. On a CPU without 16-bit matrix units the product is taken in fp32 and rounded once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) times weight (out, in) transposed, plus bias (out,)."""
    return F.linear(x, weight, bias)


class _WideLinear(torch.autograd.Function):
    """Operands and results in 16 bit, products and sums in fp32: what a GPU's matrix unit does.

    Costs one widening pass over the operands; without matrix units the 16-bit product itself is 10 to 100 times slower.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        wide = gradient.reshape(-1, gradient.shape[-1]).float()
        x_gradient = weight_gradient = bias_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = (wide @ weight.float()).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            weight_gradient = (wide.t() @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_gradient = wide.sum(0).to(weight.dtype)
        return x_gradient, weight_gradient, bias_gradient


def needs_wide(x: Tensor) -> bool:
    """Whether 16-bit products on this tensor's device are emulated element by element."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not compat.cpu_multiplies(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the reference."""
    if not needs_wide(x):
        return F.linear(x, weight, bias)
    result: Tensor = _WideLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result
