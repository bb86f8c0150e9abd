"""SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) * up."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
    result: Tensor = _Swiglu.apply(gate, up)  # type: ignore[no-untyped-call]
    return result
