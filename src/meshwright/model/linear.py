"""A linear layer whose product is a kernel, and several of them applied to one input."""

from collections.abc import Callable

from torch import Tensor, nn

from meshwright.kernels import Kernels
from meshwright.model.seams import Border


class Linear(nn.Linear):
    """x W^T + b with W (out, in). A torch Linear, so that what shards or replaces those finds it."""

    def __init__(self, size_in: int, size_out: int, kernels: Kernels, bias: bool = False) -> None:
        super().__init__(size_in, size_out, bias)
        self.kernels = kernels
        self.adds_bias = True

    @property
    def local_bias(self) -> Tensor | None:
        """The bias, where it is added here and not to another part of the same sum."""
        bias: Tensor | None = self.bias
        return bias if self.adds_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        product: Tensor = self.kernels.linear(x, self.weight, self.local_bias)
        return product


class Head(Linear):
    """The last layer, which gives logits, or at once what is made of them. It is called for either, so that its weight
    is used inside of its own call."""

    def forward(self, x: Tensor, use: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """x (..., D) -> logits (..., V), or what `use` makes of x and the weight (V, D)."""
        return super().forward(x) if use is None else use(x, self.weight)


def is_plain(layer: nn.Module) -> bool:
    """Whether a kernel may take the layer's weights without calling it: not where another module was put in its
    place."""
    return type(layer) is Linear


def read(border: Border, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """What the first layers of a part make of its input; plain ones in a single product, others one by one."""
    plain = [layer for layer in layers if isinstance(layer, Linear) and is_plain(layer)]
    if len(plain) < len(layers) or (border.read is None and len(layers) == 1):
        return tuple(layer(x) for layer in layers)
    product = border.read or plain[0].kernels.linears
    return product(x, [layer.weight for layer in plain], [layer.local_bias for layer in plain])
