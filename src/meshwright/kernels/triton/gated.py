"""SwiGLU, silu(gate) * up, and GELU: one pass forward, and one back that makes the activation again."""

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
) -> None:  # fmt: skip
    """out (N, F), contiguous; gate and up may be parts of wider rows."""
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
    """Both gradients (N, F); PRODUCT: also silu(gate) * up again, which the next matrix's gradient needs."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    given = tl.load(gradient + row * gradient_stride + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(x)
    silu = x * share
    here = row * width + at
    if PRODUCT:
        tl.store(product + here, (silu * y).to(product.dtype.element_ty), mask=inside)
    tl.store(up_gradient + here, (given * silu).to(up_gradient.dtype.element_ty), mask=inside)
    slope = share * (1.0 + x * (1.0 - share))
    tl.store(gate_gradient + here, (given * y * slope).to(gate_gradient.dtype.element_ty), mask=inside)


@triton.jit
def gelu_forward(x: Arg, out: Arg, number: Arg, TANH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """x Phi(x), or its form by tanh."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < number, other=0.0).to(tl.float32)
    if TANH:
        inner = ROOT_TWO_OVER_PI * (value + CUBE * value * value * value)
        share = tl.sigmoid(2.0 * inner)
    else:
        share = 0.5 * (1.0 + tl.erf(value * ROOT_HALF))
    tl.store(out + at, (value * share).to(out.dtype.element_ty), mask=at < number)


@triton.jit
def gelu_backward(gradient: Arg, x: Arg, found: Arg, number: Arg, TANH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """The gradient of x."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < number, other=0.0).to(tl.float32)
    given = tl.load(gradient + at, mask=at < number, other=0.0).to(tl.float32)
    if TANH:
        inner = ROOT_TWO_OVER_PI * (value + CUBE * value * value * value)
        share = tl.sigmoid(2.0 * inner)
        rise = 2.0 * ROOT_TWO_OVER_PI * (1.0 + 3.0 * CUBE * value * value)
        slope = share + value * share * (1.0 - share) * rise
    else:
        share = 0.5 * (1.0 + tl.erf(value * ROOT_HALF))
        slope = share + value * DENSITY * tl.exp(-0.5 * value * value)
    tl.store(found + at, (given * slope).to(found.dtype.element_ty), mask=at < number)


def _grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    block = min(ELEMENTS, power_of_two(width))
    return (rows, ceil_div(width, block)), block


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def activate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (N, F) of rows."""
    out = _like(gate)
    grid, block = _grid(*gate.shape)
    swiglu_forward[grid](
        gate, gate.stride(0), up, up.stride(0), out, gate.shape[1], BLOCK=block, num_warps=WARPS
    )  # fmt: skip
    return out


def gradients(
    gradient: Tensor, gate: Tensor, up: Tensor, *, product: bool = False, consume: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of gate and up (N, F), and silu(gate) * up where `product`. `consume`: the first may stand in `gradient`."""
    of_gate = gradient if consume and gradient.is_contiguous() else _like(gate)
    of_up, again = _like(gate), _like(gate) if product else None
    grid, block = _grid(*gate.shape)
    swiglu_backward[grid](
        gradient, gradient.stride(0), gate, gate.stride(0), up, up.stride(0), of_gate, of_up,
        of_up if again is None else again, gate.shape[1], PRODUCT=product, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return of_gate, of_up, again


class _GatedRows(torch.autograd.Function):
    """Saves gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        rows, others = rows_of(gate), rows_of(up)
        ctx.save_for_backward(rows, others)
        return activate(rows, others).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        found, others, _ = gradients(rows_of(gradient), gate, up)
        return found.view(gradient.shape), others.view(gradient.shape)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As kernels.swiglu.swiglu."""
    result: Tensor = _GatedRows.apply(gate, up)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return result


class _Gelu(torch.autograd.Function):
    """Saves x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        out = torch.empty_like(x)
        gelu_forward[(ceil_div(x.numel(), ELEMENTS),)](
            x, out, x.numel(), TANH=tanh, BLOCK=ELEMENTS, num_warps=WARPS
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        found = torch.empty_like(x)
        gelu_backward[(ceil_div(x.numel(), ELEMENTS),)](
            gradient.contiguous(), x, found, x.numel(), TANH=ctx.tanh, BLOCK=ELEMENTS, num_warps=WARPS
        )  # fmt: skip
        return found, None


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """As F.gelu: x Phi(x), or its form by tanh."""
    result: Tensor = _Gelu.apply(x, approximate == "tanh")  # type: ignore[no-untyped-call]  # torch has no annotations there
    return result
