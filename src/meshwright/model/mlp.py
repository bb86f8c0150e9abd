"""The feed-forward half of a block: gated (SwiGLU) or plain (GELU)."""

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels import Kernels
from meshwright.model.linear import Linear, apply_all, is_plain
from meshwright.spec.shape import ModelShape


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ffn: int, kernels: Kernels, bias: bool = False) -> None:
        super().__init__()
        self.gate = Linear(hidden, ffn, kernels, bias)
        self.up = Linear(hidden, ffn, kernels, bias)
        self.down = Linear(ffn, hidden, kernels, bias)
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        gate, up = apply_all(x, self.gate, self.up)
        if is_plain(self.down):
            down: Tensor = self.kernels.swiglu_linear(gate, up, self.down.weight, self.down.local_bias)
        else:
            down = self.down(self.kernels.swiglu(gate, up))
        return down


class PlainMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, hidden: int, ffn: int, kernels: Kernels, bias: bool, approximate: str) -> None:
        super().__init__()
        self.up = Linear(hidden, ffn, kernels, bias)
        self.down = Linear(ffn, hidden, kernels, bias)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        down: Tensor = self.down(F.gelu(self.up(x), approximate=self.approximate))
        return down


def make_mlp(shape: ModelShape, kernels: Kernels, ffn: int, bias: bool) -> nn.Module:
    """The dense feed-forward of a shape, `ffn` wide."""
    if shape.mlp == "swiglu":
        return GatedMLP(shape.hidden, ffn, kernels, bias)
    return PlainMLP(shape.hidden, ffn, kernels, bias, gelu_form(shape))


def gelu_form(shape: ModelShape) -> str:
    """What F.gelu calls the form of a shape without a gate."""
    return "tanh" if shape.mlp == "gelu_tanh" else "none"
