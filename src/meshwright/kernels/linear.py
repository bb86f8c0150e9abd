"""x W^T + b, alone or several at once from one x. On a CPU without 16-bit matrix units the product is taken in fp32."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) times weight (out, in) transposed, plus bias (out,)."""
    return F.linear(x, weight, bias)


def linears_reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Several linear layers of one input: queries, keys and values, or gate and up."""
    return tuple(linear_reference(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def needs_wide(x: Tensor) -> bool:
    """Whether 16-bit products on this tensor's device are emulated element by element."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not compat.cpu_multiplies(x.dtype)


class _Linears(torch.autograd.Function):
    """Arguments after x: n weights, then n biases (or None). Saves x once.

    The gradient of x is summed inside the products (beta = 1) instead of by passes over memory. Where 16-bit products
    are emulated, operands are widened, products and sums taken in fp32 and rounded once, as a GPU's matrix unit does;
    that costs a pass over the operands, while the emulated product is 10 to 100 times slower.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        wide = x.float() if needs_wide(x) else x
        products = []
        for weight, bias in zip(weights, biases, strict=True):
            assert weight is not None
            product = F.linear(wide, weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype))
            products.append(product.to(x.dtype))
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        count = len(weights)
        dtype = torch.float32 if needs_wide(x) else x.dtype
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        flat = [gradient.reshape(-1, gradient.shape[-1]).to(dtype) for gradient in gradients]
        total: Tensor | None = None
        if ctx.needs_input_grad[0]:
            for gradient, weight in zip(flat, weights, strict=True):
                wide = weight.to(dtype)
                total = torch.mm(gradient, wide) if total is None else total.addmm_(gradient, wide)
        found: list[Tensor | None] = [None if total is None else total.to(x.dtype).view(x.shape)]
        for index, (gradient, weight) in enumerate(zip(flat, weights, strict=True)):
            wanted = ctx.needs_input_grad[1 + index]
            found.append(torch.mm(gradient.t(), rows).to(weight.dtype) if wanted else None)
        for index, gradient in enumerate(flat):
            wanted = ctx.needs_input_grad[1 + count + index]
            found.append(gradient.sum(0).to(x.dtype) if wanted else None)
        return tuple(found)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """As the reference."""
    if torch.compiler.is_compiling() and not needs_wide(x):
        return linears_reference(x, weights, biases)
    results: tuple[Tensor, ...] = _Linears.apply(x, *weights, *biases)  # type: ignore[no-untyped-call]
    return results


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the reference."""
    if needs_wide(x):
        return linears(x, (weight,), (bias,))[0]
    return F.linear(x, weight, bias)
