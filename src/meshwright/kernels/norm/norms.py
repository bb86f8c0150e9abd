"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) and LayerNorm (Ba et al. 2016, arXiv:1607.06450)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.c import serving_library, training_rows
from meshwright.kernels.chooser import FLOATS, NARROW, device_kind, simulated_kind, uses_triton

WIDEST, WIDEST_CENTERED = 16384, 4096
"""Widest rows for which a Triton program spills no register in the backward pass: RMSNorm, LayerNorm."""
BLOCK = 32
"""Rows that a product sums in one go. A sum of all rows in one order loses digits (6 times as far off at 4,096)."""


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in fp32. x (..., D), weight (D,)."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


def _summed(scales: Tensor, x: Tensor) -> Tensor:
    """Sum scales (N, 1) times x (N, D) over rows to (D,), by blocks whose sums are added in pairs."""
    in_blocks = len(x) // BLOCK * BLOCK
    blocks = torch.bmm(scales[:in_blocks].view(-1, 1, BLOCK), x[:in_blocks].view(-1, BLOCK, x.shape[1]))
    rest = torch.mm(scales[in_blocks:].t(), x[in_blocks:])
    return blocks.sum((0, 1)) + rest.view(-1)


def _inner_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which the norm of x is computed."""
    return torch.promote_types(x.dtype, torch.float32)


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x (..., D), and one over the rms of rows (..., 1)."""
    if training_rows.takes(x, weight):
        return training_rows.rms_norm(x, weight, eps)
    squares: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_inner_dtype(x)).square_()
    scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight).to(x.dtype), scale


class _RmsNorm(torch.autograd.Function):
    """RMSNorm for CPUs, where torch's operation takes many passes and saves two fp32 copies of 16-bit rows.

    Saves x and one number per row; computes in fp32. Many rows take one pass of the compiled loops.

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
        # Read once: recomputation makes them for one reader.
        x, weight, scale = ctx.saved_tensors
        if training_rows.takes(gradient, x, weight):
            return *training_rows.rms_norm_gradients(gradient, x, weight, scale), None
        narrow, inner = gradient.dtype, _inner_dtype(gradient)
        x, weight, scale = (saved.to(inner) for saved in (x, weight, scale))
        # For a second derivative: the saved scale has no graph.
        if torch.is_grad_enabled():
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps)
        gradient, width = gradient.to(inner), x.shape[-1]
        product = (gradient * x).reshape(-1, width)
        rows = scale.reshape(-1, 1)
        weight_gradient = _summed(rows, product).to(narrow) if ctx.needs_input_grad[1] else None
        along = torch.mv(product, weight).view_as(rows).mul_(rows.pow(3)).div_(width)
        x_gradient = (gradient * weight).mul_(scale)
        return x_gradient.addcmul_(x, along.view_as(scale), value=-1).to(narrow), weight_gradient, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, prefer: str = "auto") -> Tensor:
    """Normalize as the reference does. Only x and one number a row are saved."""
    if (loops := serving_library.loops()) and serving_library.takes(x, weight):
        return loops.rms_norm(x, weight, eps)
    if uses_triton("rms_norm", x, prefer=prefer, feature=_too_wide(x)):
        from meshwright.kernels.triton import root_norm

        return root_norm.rms_norm(x, weight, eps)
    if device_kind(x) == "cpu" and x.dtype == weight.dtype in FLOATS and not torch.compiler.is_compiling():
        if not torch.is_grad_enabled():
            return _normed(x, weight, eps)[0]
        normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch has no annotations there
        return normed
    if simulated_kind() == "cuda" and not torch.compiler.is_compiling():
        return compat.fused_rms_norm(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm_reference(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x + added, and x + added; all (..., D), weight (D,)."""
    total = x + added
    return rms_norm_reference(total, weight, eps), total


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float, prefer: str = "auto") -> tuple[Tensor, Tensor]:
    """Add and normalize as the reference does. Only the sum and one number a row are saved."""
    if (loops := serving_library.loops()) and serving_library.takes(x, added, weight):
        return loops.add_rms_norm(x, added, weight, eps)
    if x.shape == added.shape and uses_triton("add_rms_norm", x, prefer=prefer, feature=_too_wide(x)):
        from meshwright.kernels.triton import root_norm

        return root_norm.add_rms_norm(x, added, weight, eps)
    total = x + added
    return rms_norm(total, weight, eps, prefer), total


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dim, computed in fp32.

    x (..., D), weight and bias (D,).
    """
    wide = x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    scaled = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight + bias


class _NarrowLayerNorm(torch.autograd.Function):
    """LayerNorm in 16 bits on CPUs. Saves x and two numbers a row.

    torch's backward pass sums the gradients of weight and bias in the dtype of x: at 4,096 rows of bf16 they are 7 %
    off.
    """

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
        gradients = backward(gradient.float(), x.float(), weight.shape, mean, scale, *wide)
        return *(None if part is None else part.to(x.dtype) for part in gradients), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, prefer: str = "auto") -> Tensor:
    """Normalize as the reference does. x and two numbers a row are saved."""
    if uses_triton("layer_norm", x, prefer=prefer, feature=_too_wide(x, WIDEST_CENTERED)):
        from meshwright.kernels.triton import root_norm

        return root_norm.layer_norm(x, weight, bias, eps)
    if device_kind(x) == "cpu" and x.dtype in NARROW and not torch.compiler.is_compiling():
        normed: Tensor = _NarrowLayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]  # torch has no annotations there
        return normed
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _too_wide(x: Tensor, most: int = WIDEST) -> str:
    return f"rows longer than {most}" if x.shape[-1] > most else ""
