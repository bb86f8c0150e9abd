"""The two norms as modules."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels import Kernels
from meshwright.spec.shape import ModelShape


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """x (..., size)."""
        normed: Tensor = self.kernels.rms_norm(x, self.weight, self.eps)
        return normed


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., size)."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(shape: ModelShape, kernels: Kernels) -> nn.Module:
    """The norm of a shape over the hidden dim."""
    if shape.norm == "layernorm":
        return LayerNorm(shape.hidden, shape.norm_eps)
    return RMSNorm(shape.hidden, shape.norm_eps, kernels)
