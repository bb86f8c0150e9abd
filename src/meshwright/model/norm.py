"""The two norms as modules."""

import torch
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

    def after(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + added, and x + added; all (..., size)."""
        if self._forward_hooks:  # they are for what `forward` gives
            total = x + added
            return self(total), total
        return self.kernels.add_rms_norm(x, added, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias."""

    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """x (..., size)."""
        normed: Tensor = self.kernels.layer_norm(x, self.weight, self.bias, self.eps)
        return normed

    def after(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + added, and x + added; all (..., size)."""
        total = x + added
        return self(total), total


def make_norm(shape: ModelShape, kernels: Kernels) -> RMSNorm | LayerNorm:
    """The norm of a shape over the hidden dim."""
    if shape.norm == "layernorm":
        return LayerNorm(shape.hidden, shape.norm_eps, kernels)
    return RMSNorm(shape.hidden, shape.norm_eps, kernels)
