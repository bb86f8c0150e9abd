"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels import training_rows
from meshwright.kernels.chooser import FLOATS, NARROW, uses_triton
from meshwright.kernels.compiled import library
from meshwright.kernels.target import acts, kind

WIDEST, WIDEST_CENTERED = 16384, 4096
"""Rows of which a Triton program spills no register, in the backward pass: of RMSNorm, and of LayerNorm."""


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; inside in fp32. x (..., D), weight (D,)."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


BLOCK = 32
"""Rows that a product sums in one go: a sum of all rows in one order loses digits (6 times as far off at 4,096)."""


def _summed(scales: Tensor, x: Tensor) -> Tensor:
    """Sum over rows of scales (N, 1) times x (N, D) -> (D,), by blocks whose sums are added in pairs."""
    whole = len(x) // BLOCK * BLOCK
    blocks = torch.bmm(scales[:whole].view(-1, 1, BLOCK), x[:whole].view(-1, BLOCK, x.shape[1]))
    rest = torch.mm(scales[whole:].t(), x[whole:])
    return blocks.sum((0, 1)) + rest.view(-1)


def _inner(x: Tensor) -> torch.dtype:
    """In which dtype the norm of x is made."""
    return torch.promote_types(x.dtype, torch.float32)


def _one_over_rms(x: Tensor, eps: float) -> Tensor:
    """Of rows x (..., D) -> (..., 1)."""
    squares: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_inner(x)).square_()
    return squares.div_(x.shape[-1]).add_(eps).rsqrt_()


def _scaled(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """x (..., D) times scale (..., 1) and weight (D,), rounded once."""
    return (x * scale).mul_(weight).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x (..., D), and one over the rms of rows (..., 1)."""
    if training_rows.takes(x, weight):
        return training_rows.rms_norm(x, weight, eps)
    scale = _one_over_rms(x, eps)
    return _scaled(x, scale, weight), scale


class _RmsNorm(torch.autograd.Function):
    """For CPUs, where torch's operation is composed of many passes and keeps two fp32 copies of 16-bit rows. Saves x
    and one number per row; inside in fp32. Of many rows the compiled loops take one pass.

    With r = 1/rms: dx = r (g w) - x r^3 / D sum(g w x), dw = sum over rows of g x r: matrix-vector products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors  # once: recomputation makes them for one reader
        if training_rows.takes(gradient, x, weight):
            return *training_rows.rms_norm_gradients(gradient, x, weight, scale), None
        narrow, inner = gradient.dtype, _inner(gradient)
        x, weight, scale = (saved.to(inner) for saved in (x, weight, scale))
        if torch.is_grad_enabled():  # a second derivative: what was kept has no graph
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps)
        gradient, width = gradient.to(inner), x.shape[-1]
        product = (gradient * x).reshape(-1, width)
        rows = scale.reshape(-1, 1)
        weight_gradient = _summed(rows, product).to(narrow) if ctx.needs_input_grad[1] else None
        along = torch.mv(product, weight).view_as(rows).mul_(rows.pow(3)).div_(width)
        x_gradient = (gradient * weight).mul_(scale)
        return x_gradient.addcmul_(x, along.view_as(scale), value=-1).to(narrow), weight_gradient, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, prefer: str = "auto") -> Tensor:
    """As the reference; only x and one number a row are saved."""
    if (own := library.loops()) and library.takes(x, weight):
        return own.rms_norm(x, weight, eps)
    if uses_triton("rms_norm", x, prefer=prefer, feature=_too_wide(x)):
        from meshwright.kernels.triton import root_norm

        return root_norm.rms_norm(x, weight, eps)
    if kind(x) == "cpu" and x.dtype == weight.dtype in FLOATS and not torch.compiler.is_compiling():
        if not torch.is_grad_enabled():
            return _normed(x, weight, eps)[0]
        result: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch has no annotations there
        return result
    if acts() == "cuda" and not torch.compiler.is_compiling():
        return compat.fused_rms_norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm_reference(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + added, and x + added; all (..., D), weight (D,)."""
    total = x + added
    return rms_norm_reference(total, weight, eps), total


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float, prefer: str = "auto") -> tuple[Tensor, Tensor]:
    """As the reference; only the sum and one number a row are saved."""
    if (own := library.loops()) and library.takes(x, added, weight):
        return own.add_rms_norm(x, added, weight, eps)
    if x.shape == added.shape and uses_triton("add_rms_norm", x, prefer=prefer, feature=_too_wide(x)):
        from meshwright.kernels.triton import root_norm

        return root_norm.add_rms_norm(x, added, weight, eps)
    total = x + added
    return rms_norm(total, weight, eps, prefer), total


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim (Ba et al. 2016, arXiv:1607.06450); inside in
    fp32. x (..., D), weight and bias (D,)."""
    wide = x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    scaled = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight + bias


class _NarrowLayerNorm(torch.autograd.Function):
    """For 16 bit on CPUs, where torch's backward pass sums the gradients of weight and bias in the dtype of x: at 4,096
    rows of bf16 they are 7 % off. Saves x and two numbers a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out, mean, scale = torch.native_layer_norm(x, weight.shape, weight.float(), bias.float(), eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, mean, scale = ctx.saved_tensors
        wide = (weight.float(), bias.float(), ctx.needs_input_grad[:3])
        backward = torch.ops.aten.native_layer_norm_backward
        found = backward(gradient.float(), x.float(), weight.shape, mean, scale, *wide)
        return *(None if one is None else one.to(x.dtype) for one in found), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, prefer: str = "auto") -> Tensor:
    """As the reference; x and two numbers a row are saved."""
    if uses_triton("layer_norm", x, prefer=prefer, feature=_too_wide(x, WIDEST_CENTERED)):
        from meshwright.kernels.triton import mean_norm

        return mean_norm.layer_norm(x, weight, bias, eps)
    if kind(x) == "cpu" and x.dtype in NARROW and not torch.compiler.is_compiling():
        result: Tensor = _NarrowLayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]  # torch has no annotations there
        return result
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _too_wide(x: Tensor, most: int = WIDEST) -> str:
    return f"rows longer than {most}" if x.shape[-1] > most else ""
