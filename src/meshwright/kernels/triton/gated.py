"""SwiGLU, silu(gate) * up, and GELU: one pass forward, and one back that recomputes the activation."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.triton.blocks import ELEMENTS, Arg, ceil_div, power_of_two, rows_of

WARPS = 4
ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_TWO_OVER_PI = tl.constexpr(0.7978845608028654)
CUBE = tl.constexpr(0.044715)
DENSITY = tl.constexpr(0.3989422804014327)
"""1 / sqrt(2 pi)."""


@triton.jit
def swiglu_forward(
    gate: Arg, gate_stride: Arg, up: Arg, up_stride: Arg, out: Arg, width: Arg, BLOCK: tl.constexpr
) -> None:
    """Compute out (N, F), contiguous. gate and up may be parts of wider rows."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(
    gradient: Arg, gradient_stride: Arg, gate: Arg, gate_stride: Arg, up: Arg, up_stride: Arg, gate_gradient: Arg,
    up_gradient: Arg, product: Arg, width: Arg, PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute both gradients (N, F). PRODUCT: also silu(gate) * up, which the next matrix's gradient needs."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    incoming = tl.load(gradient + row * gradient_stride + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(x)
    silu = x * share
    here = row * width + at
    # gate and up are here already, so the product costs a write and no read.
    if PRODUCT:
        tl.store(product + here, (silu * y).to(product.dtype.element_ty), mask=inside)
    tl.store(up_gradient + here, (incoming * silu).to(up_gradient.dtype.element_ty), mask=inside)
    slope = share * (1.0 + x * (1.0 - share))
    tl.store(gate_gradient + here, (incoming * y * slope).to(gate_gradient.dtype.element_ty), mask=inside)


@triton.jit
def gelu_forward(x: Arg, out: Arg, number: Arg, TANH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Compute x Phi(x), or its tanh approximation."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + at, mask=at < number, other=0.0).to(tl.float32)
    if TANH:
        # (1 + tanh u) / 2 is the sigmoid of 2 u.
        inner = ROOT_TWO_OVER_PI * (z + CUBE * z * z * z)
        share = tl.sigmoid(2.0 * inner)
    else:
        share = 0.5 * (1.0 + tl.erf(z * ROOT_HALF))
    tl.store(out + at, (z * share).to(out.dtype.element_ty), mask=at < number)


@triton.jit
def gelu_backward(gradient: Arg, x: Arg, x_gradient: Arg, number: Arg, TANH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Compute the gradient of x."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + at, mask=at < number, other=0.0).to(tl.float32)
    incoming = tl.load(gradient + at, mask=at < number, other=0.0).to(tl.float32)
    if TANH:
        inner = ROOT_TWO_OVER_PI * (z + CUBE * z * z * z)
        share = tl.sigmoid(2.0 * inner)
        rise = 2.0 * ROOT_TWO_OVER_PI * (1.0 + 3.0 * CUBE * z * z)
        slope = share + z * share * (1.0 - share) * rise
    else:
        share = 0.5 * (1.0 + tl.erf(z * ROOT_HALF))
        slope = share + z * DENSITY * tl.exp(-0.5 * z * z)
    tl.store(x_gradient + at, (incoming * slope).to(x_gradient.dtype.element_ty), mask=at < number)


def _grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    block = min(ELEMENTS, power_of_two(width))
    return (rows, ceil_div(width, block)), block


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def activate(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (N, F)."""
    out = _like(gate)
    grid, block = _grid(*gate.shape)
    swiglu_forward[grid](gate, gate.stride(0), up, up.stride(0), out, gate.shape[1], BLOCK=block, num_warps=WARPS)
    return out


def gradients(
    gradient: Tensor, gate: Tensor, up: Tensor, *, product: bool = False, consume: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of gate and up (N, F), and their `product`.

    `consume`: the first may overwrite `gradient`.
    """
    # A program reads its elements of the gradient before it writes there.
    of_gate = gradient if consume and gradient.is_contiguous() else _like(gate)
    of_up, again = _like(gate), _like(gate) if product else None
    grid, block = _grid(*gate.shape)
    swiglu_backward[grid](
        gradient, gradient.stride(0), gate, gate.stride(0), up, up.stride(0), of_gate, of_up,
        of_up if again is None else again, gate.shape[1], PRODUCT=product, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return of_gate, of_up, again


class _GatedRows(torch.autograd.Function):
    """SwiGLU that saves gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        rows, others = rows_of(gate), rows_of(up)
        ctx.save_for_backward(rows, others)
        return activate(rows, others).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        of_gate, of_up, _ = gradients(rows_of(gradient), gate, up)
        return of_gate.view(gradient.shape), of_up.view(gradient.shape)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute as kernels.swiglu.swiglu."""
    product: Tensor = _GatedRows.apply(gate, up)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return product


class _Gelu(torch.autograd.Function):
    """GELU that saves x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        out = torch.empty_like(x)
        gelu_forward[(ceil_div(x.numel(), ELEMENTS),)](x, out, x.numel(), TANH=tanh, BLOCK=ELEMENTS, num_warps=WARPS)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x_gradient = torch.empty_like(x)
        gelu_backward[(ceil_div(x.numel(), ELEMENTS),)](
            gradient.contiguous(), x, x_gradient, x.numel(), TANH=ctx.tanh, BLOCK=ELEMENTS, num_warps=WARPS
        )
        return x_gradient, None


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute as F.gelu: x Phi(x), or its tanh approximation."""
    activated: Tensor = _Gelu.apply(x, approximate == "tanh")  # type: ignore[no-untyped-call]  # torch has no annotations there
    return activated
