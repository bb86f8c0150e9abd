"""Feed-forward half of a block: gated (SwiGLU) or plain (GELU). Letters: D hidden, F width of the feed-forward."""

from torch import Tensor, nn

from meshwright.kernels import Kernels
from meshwright.model.linear import Linear, read, sole_matrix, write
from meshwright.model.seams import Border
from meshwright.spec.model.shape import ModelShape


class GatedMLP(nn.Module):
    """Gated feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ffn: int, kernels: Kernels, border: Border, bias: bool = False) -> None:
        super().__init__()
        self.gate = Linear(hidden, ffn, kernels, bias)
        self.up = Linear(hidden, ffn, kernels, bias)
        self.down = Linear(ffn, hidden, kernels, bias)
        self.kernels, self.border = kernels, border

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., D) to (..., D)."""
        return self.finish(*self.begin(x))

    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of `finish`: gate and up, (..., F) each."""
        return read(self.border, x, self.gate, self.up)

    def finish(self, gate: Tensor, up: Tensor) -> Tensor:
        """Map gate and up to the output (..., D)."""
        # If the down product is more than one matrix, it cannot be fused with the gate.
        weight = None if self.border.prepared is not None else sole_matrix(self.down)
        if weight is None:
            return write(self.border, self.kernels.swiglu(gate, up), self.down)
        summed = self.border.write
        down: Tensor = self.kernels.swiglu_linear(gate, up, weight, self.down.local_bias, summed)
        return down if summed else self.border.leave(down)


class PlainMLP(nn.Module):
    """Feed-forward without a gate: down(gelu(up(x)))."""

    def __init__(self, hidden: int, ffn: int, kernels: Kernels, border: Border, bias: bool, approximate: str) -> None:
        super().__init__()
        self.up = Linear(hidden, ffn, kernels, bias)
        self.down = Linear(ffn, hidden, kernels, bias)
        self.kernels, self.border, self.approximate = kernels, border, approximate

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., D) to (..., D)."""
        return self.finish(*self.begin(x))

    def begin(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the argument of `finish`, (..., F)."""
        return read(self.border, x, self.up)

    def finish(self, up: Tensor) -> Tensor:
        """Map up to the output (..., D)."""
        return write(self.border, self.kernels.gelu(up, self.approximate), self.down)


def make_mlp(shape: ModelShape, kernels: Kernels, border: Border, ffn: int, bias: bool) -> "GatedMLP | PlainMLP":
    """Build the dense feed-forward of a shape, `ffn` wide."""
    if shape.mlp == "swiglu":
        return GatedMLP(shape.hidden, ffn, kernels, border, bias)
    return PlainMLP(shape.hidden, ffn, kernels, border, bias, gelu_form(shape))


def gelu_form(shape: ModelShape) -> str:
    """Return F.gelu's `approximate` for a shape without a gate."""
    return "tanh" if shape.mlp == "gelu_tanh" else "none"
