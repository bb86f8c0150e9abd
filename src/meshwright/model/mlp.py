"""The feed-forward half of a block: gated (SwiGLU) or plain (GELU)."""

from torch import Tensor, nn

from meshwright.kernels import Kernels
from meshwright.model.linear import Linear, read, sole_matrix, write
from meshwright.model.seams import Border
from meshwright.spec.shape import ModelShape


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ffn: int, kernels: Kernels, border: Border, bias: bool = False) -> None:
        super().__init__()
        self.gate = Linear(hidden, ffn, kernels, bias)
        self.up = Linear(hidden, ffn, kernels, bias)
        self.down = Linear(ffn, hidden, kernels, bias)
        self.kernels, self.border = kernels, border

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return self.finish(*self.begin(x))

    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        """What `finish` takes: the gate and what it is for, (..., F) each."""
        return read(self.border, x, self.gate, self.up)

    def finish(self, gate: Tensor, up: Tensor) -> Tensor:
        """-> (..., D)."""
        weight = None if self.border.prepared is not None else sole_matrix(self.down)
        if weight is None:
            return write(self.border, self.kernels.swiglu(gate, up), self.down)
        summed = self.border.write
        down: Tensor = self.kernels.swiglu_linear(gate, up, weight, self.down.local_bias, summed)
        return down if summed else self.border.leave(down)


class PlainMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, hidden: int, ffn: int, kernels: Kernels, border: Border, bias: bool, approximate: str) -> None:
        super().__init__()
        self.up = Linear(hidden, ffn, kernels, bias)
        self.down = Linear(ffn, hidden, kernels, bias)
        self.kernels, self.border, self.approximate = kernels, border, approximate

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return self.finish(*self.begin(x))

    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        """What `finish` takes: (..., F)."""
        return read(self.border, x, self.up)

    def finish(self, up: Tensor) -> Tensor:
        """-> (..., D)."""
        return write(self.border, self.kernels.gelu(up, self.approximate), self.down)


def make_mlp(shape: ModelShape, kernels: Kernels, border: Border, ffn: int, bias: bool) -> "GatedMLP | PlainMLP":
    """The dense feed-forward of a shape, `ffn` wide."""
    if shape.mlp == "swiglu":
        return GatedMLP(shape.hidden, ffn, kernels, border, bias)
    return PlainMLP(shape.hidden, ffn, kernels, border, bias, gelu_form(shape))


def gelu_form(shape: ModelShape) -> str:
    """What F.gelu calls the form of a shape without a gate."""
    return "tanh" if shape.mlp == "gelu_tanh" else "none"
