"""RMSNorm and LayerNorm."""

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels
from meshwright.spec.model.shape import ModelShape


class RMSNorm(nn.Module):
    """Root-mean-square norm: x / rms(x) * weight."""

    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x (..., size)."""
        normed: Tensor = self.kernels.rms_norm(x, self.weight, self.eps)
        return normed

    def after(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + added, and x + added. All are (..., size)."""
        if self._forward_hooks:  # hooks expect the output of `forward`
            total = x + added
            return self(total), total
        return self.kernels.add_rms_norm(x, added, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm: (x - mean) / std * weight + bias."""

    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x (..., size)."""
        normed: Tensor = self.kernels.layer_norm(x, self.weight, self.bias, self.eps)
        return normed

    def after(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + added, and x + added. All are (..., size)."""
        total = x + added
        return self(total), total


def make_norm(shape: ModelShape, kernels: Kernels) -> RMSNorm | LayerNorm:
    """Build the norm of a shape over the hidden dim."""
    if shape.norm == "layernorm":
        return LayerNorm(shape.hidden, shape.norm_eps, kernels)
    return RMSNorm(shape.hidden, shape.norm_eps, kernels)
