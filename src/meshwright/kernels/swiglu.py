"""SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) * up."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.linear import as_leaf, is_left, linear, linear_reference, needs_wide, weight_product


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; all (..., F)."""
    return F.silu(gate) * up


class _Swiglu(torch.autograd.Function):
    """Saves gate and up; silu(gate) is made again in the backward pass, which costs one pass and saves one tensor."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        wanted_gate, wanted_up = ctx.needs_input_grad
        gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate) if wanted_gate else None
        up_gradient = F.silu(gate).mul_(gradient) if wanted_up else None
        return gate_gradient, up_gradient


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As the reference, with one saved tensor less."""
    if torch.compiler.is_compiling():
        return swiglu_reference(gate, up)
    result: Tensor = _Swiglu.apply(gate, up)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return result


def swiglu_linear_reference(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The second half of a gated MLP: (silu(gate) * up) W^T + b; gate, up (..., F), weight (D, F), bias (D,)."""
    return linear_reference(swiglu_reference(gate, up), weight, bias)


class _SwigluLinear(torch.autograd.Function):
    """Saves gate and up but not their product: a third of the MLP's activations less, for two passes more."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.leaf, ctx.has_bias = as_leaf(weight), bias is not None
        return F.linear(F.silu(gate).mul_(up), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        inner = torch.mm(flat, weight).view_as(gate)
        silu = F.silu(gate)
        weight_gradient = bias_gradient = None
        if ctx.needs_input_grad[2]:
            product = partial(weight_product, flat, (silu * up).reshape(flat.shape[0], -1), weight.dtype)
            weight_gradient = None if is_left(ctx.leaf, product) else product()
        if ctx.has_bias and ctx.needs_input_grad[3]:
            bias_gradient = flat.sum(0)
        up_gradient = silu.mul_(inner)
        gate_gradient = torch.ops.aten.silu_backward(inner.mul_(up), gate)
        return gate_gradient, up_gradient, weight_gradient, bias_gradient


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the reference; nothing of the size of the product is saved."""
    if torch.compiler.is_compiling() or needs_wide(gate):
        return linear(swiglu(gate, up), weight, bias)
    result: Tensor = _SwigluLinear.apply(gate, up, weight, bias)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return result
