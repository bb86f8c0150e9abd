"""A linear layer whose product is a kernel."""

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels


class Linear(nn.Module):
    """x W^T + b with W (out, in)."""

    def __init__(self, size_in: int, size_out: int, kernels: Kernels, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))
        self.bias = nn.Parameter(torch.empty(size_out)) if bias else None
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        product: Tensor = self.kernels.linear(x, self.weight, self.bias)
        return product
