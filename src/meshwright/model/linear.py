"""A linear layer whose product is a kernel, and several of them applied to one input."""

from torch import Tensor, nn

from meshwright import compat
from meshwright.kernels import Kernels


class Linear(nn.Linear):
    """x W^T + b with W (out, in). A torch Linear, so that what shards or replaces those finds it."""

    def __init__(self, size_in: int, size_out: int, kernels: Kernels, bias: bool = False) -> None:
        super().__init__(size_in, size_out, bias)
        self.kernels = kernels
        self.adds_bias = True

    @property
    def local_bias(self) -> Tensor | None:
        """The bias, where it is added here: of ranks that share a sum, one adds it (parallel/tensor.py)."""
        bias: Tensor | None = self.bias
        return bias if self.adds_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        product: Tensor = self.kernels.linear(x, self.weight, self.local_bias)
        return product


class Head(Linear):
    """The last layer, which gives logits, or at once the loss that they make. It is called for either: what gathers its
    weight for a call (FSDP) must see it used."""

    def forward(self, x: Tensor, targets: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """x (..., D) -> logits (..., V); x (N, D) with targets (N,) -> summed cross-entropy (), times scale."""
        if targets is None:
            return super().forward(x)
        loss: Tensor = self.kernels.linear_cross_entropy(x, self.weight, targets, scale)
        return loss


def is_plain(layer: nn.Module) -> bool:
    """Whether a kernel may take the layer's weights without calling it: not where another module was put in its place,
    nor where hooks hang on the call, as tensor parallelism's that gather, split or reduce."""
    return type(layer) is Linear and not compat.is_hooked(layer)


def apply_all(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """The layers' results for one input; plain ones in a single call, others one by one."""
    plain = [layer for layer in layers if isinstance(layer, Linear) and is_plain(layer)]
    if len(plain) < len(layers):
        return tuple(layer(x) for layer in layers)
    found: tuple[Tensor, ...] = plain[0].kernels.linears(
        x, [layer.weight for layer in plain], [layer.local_bias for layer in plain]
    )
    return found
