"""A linear layer whose product is a kernel, and several of them applied to one input."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

from torch import Tensor, nn

from meshwright import compat
from meshwright.kernels import Kernels
from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.model.quantized_weights import QuantizedWeight
from meshwright.model.seams import Border
from meshwright.spec.errors import IllegalLayout

Matrix = Tensor | QuantizedMatrix
"""What a layer multiplies with: (out, in), or codes and scales that stand for it."""


class Weight(Protocol):
    """What a product multiplies with, where that is not the layer's matrix alone: a low-rank sum."""

    adds_bias: bool
    """Whether `result` adds the bias; else the first product has it."""

    def read(self, x: Tensor) -> Tensor:
        """What is multiplied of the input (..., in); layers of one input agree on it."""

    def matrices(self, weight: Matrix) -> Sequence[Matrix]:
        """What that is multiplied with, each (some, in); `weight` (out, in) is the layer's own."""

    def alone(self, weight: Tensor) -> Tensor | None:
        """What the input itself is multiplied with, where that product is the result; None where it is not."""

    def result(self, layer: "Linear", x: Tensor, products: Sequence[Tensor]) -> Tensor:
        """x (..., in) and its products with the matrices -> (..., out)."""


class Linear(nn.Linear):
    """x W^T + b with W (out, in). A torch Linear, so that what shards or replaces those finds it."""

    def __init__(self, size_in: int, size_out: int, kernels: Kernels, bias: bool = False) -> None:
        super().__init__(size_in, size_out, bias)
        self.kernels = kernels
        self.adds_bias = True
        self.lora: Weight | None = None
        self.quantized: QuantizedWeight | None = None

    @property
    def matrix(self) -> Matrix:
        """Its weight, or the codes that stand for it."""
        return self.weight if self.quantized is None else self.quantized.matrix

    @property
    def local_bias(self) -> Tensor | None:
        """The bias, where it is added here and not to another part of the same sum."""
        bias: Tensor | None = self.bias
        return bias if self.adds_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        if self.lora is not None or self.quantized is not None:
            return products(self.kernels.linears, x, (self,))[0]
        product: Tensor = self.kernels.linear(x, self.weight, self.local_bias)
        return product


class Head(Linear):
    """The last layer, which gives logits, or at once what is made of them. It is called for either, so that its weight
    is used inside of its own call."""

    def forward(self, x: Tensor, use: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """x (..., D) -> logits (..., V), or what `use` makes of x and the weight (V, D)."""
        assert self.lora is None, "what is made of logits takes the head's own matrix"
        return super().forward(x) if use is None else use(x, self.weight)


def held_rows(layer: nn.Module, whole: int) -> int:
    """Outputs that a layer gives: of a part of a model those of its own matrix, `whole` where it is another module."""
    if not isinstance(layer, Linear):
        return whole
    return len(layer.weight) if layer.quantized is None else layer.quantized.rows


def is_plain(layer: nn.Module) -> TypeGuard[Linear]:
    """Whether a kernel may take the layer's matrix without calling it: not where another module, or another weight, was
    put in its place, or something hangs on its call."""
    return is_ours(layer) and layer.lora is None and layer.quantized is None


def is_ours(layer: nn.Module) -> TypeGuard[Linear]:
    """Whether its matrix, which may be codes, is all that its call is made of."""
    return type(layer) is Linear and not compat.is_hooked(layer)


def sole_matrix(layer: Linear) -> Tensor | None:
    """What a kernel may multiply the layer's input with instead of calling it; None where its call is more than that
    product."""
    if not is_ours(layer) or layer.quantized is not None:
        return None
    return layer.weight if layer.lora is None else layer.lora.alone(layer.weight)


def read(border: Border, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """What the first layers of a part make of its input, in a single product; other modules than ours, and those with
    hooks, one by one. IllegalLayout where such a one stands at the border of a tensor-parallel part, whose input is
    entered by the product."""
    if border.prepared is not None and (found := border.prepared(x, layers)) is not None:
        return found
    ours = [layer for layer in layers if is_ours(layer)]
    if len(ours) < len(layers) and border.read is not None:
        raise IllegalLayout(
            "a layer before a tensor-parallel part was replaced or has hooks: take layout.tp=1, or set its "
            "weight (Linear.lora) instead"
        )
    if border.read is not None and any(layer.quantized is not None for layer in ours):
        return products(ours[0].kernels.linears, border.enter(x), ours)
    if len(ours) < len(layers) or (border.read is None and len(layers) == 1):
        return tuple(layer(x) for layer in layers)
    return products(border.read or ours[0].kernels.linears, x, ours)


def write(border: Border, x: Tensor, layer: nn.Module) -> Tensor:
    """What the last layer of a part gives to the residual stream."""
    if border.prepared is not None and (found := border.prepared(x, (layer,))) is not None:
        return border.leave(found[0])
    if border.write is None or not is_ours(layer) or (weight := sole_matrix(layer)) is None:
        return border.leave(layer(x))
    return border.write.linear(x, weight, layer.local_bias)


def products(product: Callable[..., tuple[Tensor, ...]], x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    """The layers' results for one input; `product` as kernels.linears."""
    if all(is_bare(layer) for layer in layers):
        return product(x, [layer.weight for layer in layers], [layer.local_bias for layer in layers])
    x = layers[0].lora.read(x) if layers[0].lora else x
    matrices = [layer.lora.matrices(layer.matrix) if layer.lora else (layer.matrix,) for layer in layers]
    biases = [
        [None if layer.lora and layer.lora.adds_bias else layer.local_bias, *[None] * (len(some) - 1)]
        for layer, some in zip(layers, matrices, strict=True)
    ]
    every = [one for some in matrices for one in some]
    found = iter(_mixed(product, layers[0].kernels, x, every, [one for some in biases for one in some]))
    parts = [[next(found) for _ in some] for some in matrices]
    return tuple(
        layer.lora.result(layer, x, own) if layer.lora else own[0] for layer, own in zip(layers, parts, strict=True)
    )


def is_bare(layer: Linear) -> bool:
    """Whether it multiplies with its weight and nothing else."""
    return layer.lora is None and layer.quantized is None


def _mixed(
    product: Callable[..., tuple[Tensor, ...]], kernels: Kernels, x: Tensor, matrices: Sequence[Matrix],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:  # fmt: skip
    """x times each; those that are quantized, and the others, in one call each."""
    found: dict[int, Tensor] = {}
    for quantized, multiply in ((True, kernels.quantized_linears), (False, product)):
        places = [place for place, one in enumerate(matrices) if isinstance(one, QuantizedMatrix) == quantized]
        if places:
            some = multiply(x, [matrices[place] for place in places], [biases[place] for place in places])
            found.update(zip(places, some, strict=True))
    return [found[place] for place in range(len(matrices))]
