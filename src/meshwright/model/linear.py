"""A linear layer whose product is a kernel, and several of them applied to one input."""

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


def apply_all(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The layers' results for one input; plain ones in a single call, anything put in their place one by one."""
    plain = [layer for layer in layers if type(layer) is Linear]
    if len(plain) < len(layers):
        return tuple(layer(x) for layer in layers)
    found: tuple[Tensor, ...] = plain[0].kernels.linears(
        x, [layer.weight for layer in plain], [layer.bias for layer in plain]
    )
    return found
