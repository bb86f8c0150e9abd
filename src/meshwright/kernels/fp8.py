"""Linear products of operands rounded to 8 bits: e4m3, 4 bits of exponent and 3 of mantissa.

    y  = x W^T     x scaled by rows, W by rows (outputs)
    dX = G W       G scaled by rows, W by columns (inputs)
    dW = G^T x     form FP8: as it is, in 16 bit, since one outlier spoils a whole row of tokens
                   form FP8_ALL: both scaled by columns, each over all tokens

Each row has a scale of its own: the power of two that brings its largest number just below 448, so that scaling itself
rounds nothing (Micikevicius et al. 2022, arXiv:2209.05433; the two forms are torchao's `rowwise_with_gw_hp` and
`rowwise`; e4m3 for gradients too, as DeepSeek-V3 has it, arXiv:2412.19437, section 3.3). Sums are fp32. Where a device
has no such product, numbers are rounded the same way and multiplied in fp32: the same results but for the order of
sums, and slower.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.chooser import uses_triton
from meshwright.kernels.target import acts, kind

SAME, FP8, FP8_ALL = "same", "fp8", "fp8-all"
"""Forms of a product, as recipe.products: of operands as they are, or rounded to 8 bits; FP8 but for gradients of
weights and for experts."""
LARGEST = 448.0
"""Of e4m3."""
SMALLEST = 1e-12
"""Below which a row's largest number counts as this, so that zeros have a scale."""
MULTIPLE = 16
"""Of both dims of a matrix, which the products of tensor cores want."""
LEAST = (8, 9)
"""Compute capability from which on tensor cores multiply 8-bit numbers."""


class Narrow(NamedTuple):
    """x (N, K) as e4m3 values times a scale of each row (N, 1) fp32."""

    values: Tensor
    scales: Tensor

    def wide(self) -> Tensor:
        """The numbers that it stands for, fp32."""
        return self.values.float() * self.scales


def missing(device: torch.device) -> str:
    """Why a device has no 8-bit products; empty where it has."""
    if device.type != "cuda":
        return f"a {device.type.upper()} multiplies no 8-bit numbers"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST:
        return f"{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]}) multiplies no 8-bit numbers"
    return ""


def narrow(x: Tensor | Narrow, prefer: str = "auto") -> Narrow:
    """x (..., N, K), rounded once; as it is where it already was. `prefer`: one of chooser.PREFERENCES."""
    if isinstance(x, Narrow):
        return x
    if in_one_kernel(x, prefer):
        from meshwright.kernels.triton import narrowing

        if x.stride(-1) != 1 and x.stride(-2) == 1:  # what lies side by side in memory are columns
            return Narrow(*narrowing.turned(x.mT, x.shape[-1]))
        codes, scales = narrowing.rounded(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn)
        return Narrow(codes.view(x.shape), scales.view(*x.shape[:-1], 1))
    if acts() == "cuda" and compat.is_fake(x):  # a dry run holds what the kernel writes
        codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
        return Narrow(codes, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
    scales = scales_of(x, -1)
    return Narrow((x * scales.to(x.dtype)).to(torch.float8_e4m3fn).contiguous(), 1 / scales)


def in_one_kernel(x: Tensor, prefer: str = "auto") -> bool:
    """Whether x is read and written by the kernels of triton/narrowing.py, with no copy beside it."""
    return x.numel() > 0 and uses_triton("narrow", x, prefer=prefer)


def narrow_columns(x: Tensor | Narrow, prefer: str = "auto") -> Narrow:
    """x (N, C) -> its columns (C, N), with zeros behind them up to a multiple that products can add over."""
    if isinstance(x, Narrow):
        return x
    missing_rows = -len(x) % MULTIPLE
    if x.stride(-1) == 1 and in_one_kernel(x, prefer):
        from meshwright.kernels.triton import narrowing

        return Narrow(*narrowing.turned(x, len(x) + missing_rows))
    return narrow((F.pad(x, (0, 0, 0, missing_rows)) if missing_rows else x).t())


def scales_of(x: Tensor, dim: int) -> Tensor:
    """fp32, with a size of 1 at `dim`: what brings the largest number along it just below LARGEST."""
    peaks = x.abs().amax(dim, keepdim=True).float().clamp(min=SMALLEST)
    return torch.exp2(torch.floor(torch.log2(LARGEST / peaks)))


def product(a: Narrow, b: Narrow, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a (N, K) times b (M, K) transposed, plus bias (M,) -> (N, M), rounded once."""
    if kind(a.values) == "cuda" and (acts() or not missing(a.values.device)):
        return compat.scaled_product(*a, *b, bias, dtype)
    found = F.linear(a.values.float(), b.values.float()) * a.scales * b.scales.t()
    return (found if bias is None else found + bias).to(dtype)


def products(
    x: Tensor, weights: Iterable[Tensor | Narrow], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:  # fmt: skip
    """x (..., in) times each weight (out, in) transposed, plus its bias; x is rounded once."""
    rows = narrow(x.reshape(-1, x.shape[-1]))
    found = (product(rows, narrow(one), x.dtype, bias) for one, bias in zip(weights, biases, strict=True))
    return tuple(one.view(*x.shape[:-1], -1) for one in found)


def products_with(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Callable[[Tensor], tuple[Tensor, ...]]:  # fmt: skip
    """`products` with weights that are rounded once, for several x."""
    return partial(products, weights=[narrow(one) for one in weights], biases=biases)


def input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor | Narrow]) -> Tensor:
    """gradients (..., out) of several products of one x -> that of x (..., in)."""
    first, total = gradients[0], None
    for gradient, weight in zip(gradients, weights, strict=True):
        columns = narrow(weight if isinstance(weight, Narrow) else weight.t())
        part = product(narrow(gradient.reshape(-1, gradient.shape[-1])), columns, first.dtype)
        total = part if total is None else total + part
    assert total is not None
    return total.view(*first.shape[:-1], -1)


def weight_gradient(gradient: Tensor, x: Tensor | Narrow, dtype: torch.dtype) -> Tensor:
    """gradient (N, out), x (N, in) or its `narrow_columns` -> gradient^T x (out, in)."""
    if not len(gradient):
        assert isinstance(x, Tensor)
        return gradient.new_zeros(gradient.shape[1], x.shape[1], dtype=dtype)
    return product(narrow_columns(gradient), narrow_columns(x), dtype)


class _Plain(torch.autograd.Function):
    """The three products written out, each on the numbers that the rounded operands stand for, by torch alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, form: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.form = form
        return (narrow(x, "eager").wide() @ narrow(weight, "eager").wide().t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        x_gradient = (narrow(gradient, "eager").wide() @ narrow(weight.t(), "eager").wide().t()).to(x.dtype)
        if ctx.form == FP8_ALL and len(x):
            columns = narrow(gradient.t(), "eager").wide(), narrow(x.t(), "eager").wide()
            return x_gradient, (columns[0] @ columns[1].t()).to(weight.dtype), None
        return x_gradient, (gradient.float().t() @ x.float()).to(weight.dtype), None


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, form: str = FP8) -> Tensor:
    """x (..., in), weight (out, in), bias (out,)."""
    found: Tensor = _Plain.apply(x.reshape(-1, x.shape[-1]), weight, form)  # type: ignore[no-untyped-call]  # torch has no annotations there
    found = found.view(*x.shape[:-1], len(weight))
    return found if bias is None else found + bias


def linears_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], form: str = FP8
) -> tuple[Tensor, ...]:
    """Several of one x."""
    return tuple(linear_reference(x, weight, bias, form) for weight, bias in zip(weights, biases, strict=True))


def swiglu_linear_reference(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, summed: Any = None, form: str = FP8
) -> Tensor:  # fmt: skip
    """As kernels.swiglu.swiglu_linear_reference."""
    product = summed.linear if summed else partial(linear_reference, form=form)
    found: Tensor = product(F.silu(gate) * up, weight, bias)
    return found
