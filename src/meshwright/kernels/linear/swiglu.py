"""SwiGLU (Shazeer 2020, arXiv:2002.05202), silu(gate) * up, and GELU."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.c import serving_library, training_rows
from meshwright.kernels.chooser import uses_triton
from meshwright.kernels.linear.linear import (
    SAME,
    EarlySave,
    PlainProduct,
    SummedProduct,
    later_product,
    linear_reference,
)
from meshwright.kernels.linear.weight_gradients import as_leaf, is_taken


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, elementwise. Both inputs and the result are (..., F)."""
    return F.silu(gate) * up


class _Swiglu(torch.autograd.Function):
    """SwiGLU that saves gate and up. The backward pass recomputes silu(gate): one pass more, one saved tensor less."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _product(gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        wanted_gate, wanted_up = ctx.needs_input_grad
        gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate) if wanted_gate else None
        up_gradient = F.silu(gate).mul_(gradient) if wanted_up else None
        return gate_gradient, up_gradient


def swiglu(gate: Tensor, up: Tensor, prefer: str = "auto") -> Tensor:
    """Compute as the reference does, with one saved tensor less."""
    if (
        (loops := serving_library.loops())
        and gate.numel() == gate.shape[-2] * gate.shape[-1]
        and serving_library.takes(gate, up)
    ):
        return loops.swiglu(gate, up)
    if torch.compiler.is_compiling():
        return swiglu_reference(gate, up)
    if uses_triton("swiglu", gate, prefer=prefer):
        from meshwright.kernels.triton import gated

        return gated.swiglu(gate, up)
    if not torch.is_grad_enabled():
        return _product(gate, up)
    product: Tensor = _Swiglu.apply(gate, up)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return product


def swiglu_linear_reference(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, summed: SummedProduct | None = None
) -> Tensor:
    """Apply the second half of a gated MLP: (silu(gate) * up) W^T + b.

    gate, up (..., F), weight (D, F), bias (D,).
    """
    product = summed.linear if summed else linear_reference
    return product(swiglu_reference(gate, up), weight, bias)


class _SwigluLinear(torch.autograd.Function):
    """Second half of an MLP that saves gate and up but not their product.

    That saves a third of the MLP's activations, for two passes more.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, in_triton: bool,
        summed: SummedProduct, saved: EarlySave,
    ) -> Tensor:  # fmt: skip
        ctx.leaf, ctx.has_bias, ctx.in_triton, ctx.summed, ctx.saved = (
            as_leaf(weight), bias is not None, in_triton, summed, saved,
        )  # fmt: skip
        return summed.product(_product(gate, up, in_triton), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up, weight = ctx.saved.tensors
        part, inner = ctx.summed.gradient(gradient, weight)
        flat = part.reshape(-1, part.shape[-1])
        of_inner = _fused_gradients if ctx.in_triton else _inner_gradients
        gradients = of_inner(inner, gate, up, ctx.needs_input_grad[2])
        again = next(gradients)
        weight_gradient = bias_gradient = None
        if again is not None:
            product = later_product(flat, again.reshape(flat.shape[0], -1), weight.dtype, ctx.summed.form)
            weight_gradient = None if is_taken(ctx.leaf, product) else product()
        if ctx.has_bias and ctx.needs_input_grad[3]:
            bias_gradient = flat.sum(0)
        return *gradients, weight_gradient, bias_gradient, None, None, None


def _inner_gradients(inner: Tensor, gate: Tensor, up: Tensor, again: bool) -> Iterator[Tensor | None]:
    """Yield silu(gate) * up where wanted (`again`), then the gradients of gate and up from that of the product."""
    if training_rows.takes(inner, gate, up):
        of_gate, of_up, product = training_rows.swiglu_gradients(inner, gate, up, again)
        yield from (product, of_gate, of_up)
        return
    # Two buffers serve four tensors: each is overwritten after its last reader.
    silu = F.silu(gate)
    yield silu * up if again else None
    up_gradient = silu.mul_(inner)
    torch.ops.aten.silu_backward.grad_input(inner.mul_(up), gate, grad_input=inner)
    yield inner
    yield up_gradient


def _fused_gradients(inner: Tensor, gate: Tensor, up: Tensor, again: bool) -> Iterator[Tensor | None]:
    """Yield the same from one kernel."""
    from meshwright.kernels.triton import blocks, gated

    rows = map(blocks.rows_of, (inner, gate, up))
    of_gate, of_up, product = gated.gradients(*rows, product=again, consume=True)
    yield product
    yield of_gate.view(gate.shape)
    yield of_up.view(up.shape)


def _product(gate: Tensor, up: Tensor, in_triton: bool = False) -> Tensor:
    if not in_triton:
        return training_rows.swiglu(gate, up) if training_rows.takes(gate, up) else F.silu(gate).mul_(up)
    from meshwright.kernels.triton import blocks, gated

    return gated.activate(blocks.rows_of(gate), blocks.rows_of(up)).view(gate.shape)


def swiglu_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, summed: SummedProduct | None = None,
    prefer: str = "auto", form: str = SAME,
) -> Tensor:  # fmt: skip
    """Compute as the reference does, without saving anything of the size of the product.

    `form`: form of a product that is not `summed`.
    """
    summed = summed or PlainProduct(form)
    # The compiler chooses by itself what to save and what to compute again.
    if torch.compiler.is_compiling():
        return summed.linear(swiglu(gate, up, prefer), weight, bias)
    in_triton = uses_triton("swiglu", gate, prefer=prefer)
    saved = EarlySave()
    gate, up = saved(gate, up, weight, changed=2, bias=bias)
    y: Tensor = _SwigluLinear.apply(gate, up, weight, bias, in_triton, summed, saved)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return y


def gelu_reference(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x Phi(x), or its tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return F.gelu(x, approximate=approximate)


def gelu(x: Tensor, approximate: str = "none", prefer: str = "auto") -> Tensor:
    """Compute as the reference does."""
    if uses_triton("gelu", x, prefer=prefer):
        from meshwright.kernels.triton import gated

        return gated.gelu(x, approximate)
    return F.gelu(x, approximate=approximate)
