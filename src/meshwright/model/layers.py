"""Layers that every part of a block uses: linear ones, products of several with one input, and the two norms."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from meshwright import compat
from meshwright.kernels import Kernels
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.model.quantized_weights import QuantizedWeight
from meshwright.model.seams import Border
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.model.shape import ModelShape

Matrix = Tensor | QuantizedMatrix
"""Matrix of a layer: (out, in), or the codes and scales that stand for it."""


class Weight(Protocol):
    """Replacement of a layer's matrix in its product, such as a low-rank sum."""

    adds_bias: bool
    """True if `combine` adds the bias. Otherwise the first product has it."""

    def read(self, x: Tensor) -> Tensor:
        """Return the multiplied form of the input (..., in). Layers that share an input agree on it."""

    def matrices(self, weight: Matrix) -> Sequence[Matrix]:
        """Return the matrices (..., in) that the input is multiplied with. `weight` (out, in) is the layer's."""

    def sole_matrix(self, weight: Tensor) -> Tensor | None:
        """Return the matrix whose product with the input is the result. None if the result is more than one product."""

    def combine(self, layer: "Linear", x: Tensor, products: Sequence[Tensor], keys: Tensor | None = None) -> Tensor:
        """Map x (..., in) and its products with the matrices to (..., out). `keys` (...) are those of dropout."""


class Linear(nn.Linear):
    """Linear layer x W^T + b with W (out, in). Subclasses torch.nn.Linear for tools that shard or replace those."""

    def __init__(self, size_in: int, size_out: int, kernels: Kernels, bias: bool = False) -> None:
        super().__init__(size_in, size_out, bias)
        self.kernels = kernels
        self.adds_bias = True
        self.lora: Weight | None = None
        self.quantized: QuantizedWeight | None = None

    @property
    def matrix(self) -> Matrix:
        """Weight of the layer, or the codes that stand for it."""
        return self.weight if self.quantized is None else self.quantized.matrix

    @property
    def local_bias(self) -> Tensor | None:
        """Bias, where it is added here and not to another part of the same sum."""
        bias: Tensor | None = self.bias
        return bias if self.adds_bias else None

    def forward(self, x: Tensor, *, keys: Tensor | None = None) -> Tensor:
        """Map x (..., in) to (..., out). `keys` (...) are those of an adapter's dropout."""
        if self.lora is not None or self.quantized is not None:
            return products(self.kernels.linears, x, (self,), keys)[0]
        product: Tensor = self.kernels.linear(x, self.weight, self.local_bias)
        return product


class Head(Linear):
    """Last layer: returns logits, or what is computed from them in its own call."""

    def forward(
        self, x: Tensor, use: Callable[[Tensor, Tensor], Any] | None = None, *, keys: Tensor | None = None
    ) -> Any:
        """Map x (..., D) to logits (..., V), or return use(x, weight (V, D))."""
        assert self.lora is None, "losses use the head's own matrix"
        return super().forward(x) if use is None else use(x, self.weight)


def held_rows(layer: nn.Module, whole: int) -> int:
    """Return the number of outputs that a layer gives: its own on a part of a model, `whole` for another module."""
    if not isinstance(layer, Linear):
        return whole
    return len(layer.weight) if layer.quantized is None else layer.quantized.rows


def is_plain(layer: nn.Module) -> TypeGuard[Linear]:
    """Return True if a kernel may use the layer's matrix without a call: no hooks, no other module or weight."""
    return is_ours(layer) and layer.lora is None and layer.quantized is None


def is_ours(layer: nn.Module) -> TypeGuard[Linear]:
    """Return True if the call of a layer is only the product with its matrix, which may be codes."""
    return type(layer) is Linear and not compat.is_hooked(layer)


def sole_matrix(layer: Linear) -> Tensor | None:
    """Return the matrix by which a kernel may replace the layer's call. None if the call is more than that product."""
    if not is_ours(layer) or layer.quantized is not None:
        return None
    return layer.weight if layer.lora is None else layer.lora.sole_matrix(layer.weight)


def call(layer: nn.Module, x: Tensor, keys: Tensor | None) -> Tensor:
    """Call a layer, of which only ours have adapters with dropout."""
    output: Tensor = layer(x) if keys is None or not isinstance(layer, Linear) else layer(x, keys=keys)
    return output


def read(border: Border, x: Tensor, *layers: nn.Module, keys: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the outputs of a part's first layers for its input, from one product.

    Other modules than ours, and layers with hooks, are called one by one. Raises IllegalLayout when such a layer is at
    the border of a tensor-parallel part, whose input is entered by the product.
    """
    if border.prepared is not None and (prepared := border.prepared(x, layers)) is not None:
        return prepared
    ours = [layer for layer in layers if is_ours(layer)]
    if len(ours) < len(layers) and border.read is not None:
        raise IllegalLayout(
            "a layer before a tensor-parallel part was replaced or has hooks: take layout.tp=1, or set its "
            "weight (Linear.lora) instead"
        )
    # The fused product of a border reads no codes, and one input, which adapters with dropout do not share. So its
    # collective and the products run one after the other.
    if border.read is not None and (keys is not None or any(layer.quantized is not None for layer in ours)):
        return products(ours[0].kernels.linears, border.enter(x), ours, keys)
    if len(ours) < len(layers) or (border.read is None and len(layers) == 1):
        return tuple(call(layer, x, keys) for layer in layers)
    return products(border.read or ours[0].kernels.linears, x, ours, keys)


def write(border: Border, x: Tensor, layer: nn.Module, keys: Tensor | None = None) -> Tensor:
    """Return what the last layer of a part adds to the residual stream."""
    if border.prepared is not None and (prepared := border.prepared(x, (layer,))) is not None:
        return border.leave(prepared[0])
    if border.write is None or not is_ours(layer) or (weight := sole_matrix(layer)) is None:
        return border.leave(call(layer, x, keys))
    return border.write.linear(x, weight, layer.local_bias)


def products(
    product: Callable[..., tuple[Tensor, ...]], x: Tensor, layers: Sequence[Linear], keys: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the layers' outputs for one input. `product` has the signature of kernels.linears, `keys` see Linear."""
    if all(is_bare(layer) for layer in layers):
        return product(x, [layer.weight for layer in layers], [layer.local_bias for layer in layers])
    # Layers that share an input agree on how to read it.
    x = layers[0].lora.read(x) if layers[0].lora else x
    matrices = [layer.lora.matrices(layer.matrix) if layer.lora else (layer.matrix,) for layer in layers]
    biases = [
        [None if layer.lora and layer.lora.adds_bias else layer.local_bias, *[None] * (len(layer_matrices) - 1)]
        for layer, layer_matrices in zip(layers, matrices, strict=True)
    ]
    # One flat list, so matrices of all layers share a product; its outputs are dealt back to the layers in order.
    outputs = iter(_multiply_each(product, layers[0].kernels, x, list(chain(*matrices)), list(chain(*biases))))
    parts = [[next(outputs) for _ in layer_matrices] for layer_matrices in matrices]
    return tuple(
        layer.lora.combine(layer, x, layer_products, keys) if layer.lora else layer_products[0]
        for layer, layer_products in zip(layers, parts, strict=True)
    )


def is_bare(layer: Linear) -> bool:
    """Return True if the layer multiplies with its weight and nothing else."""
    return layer.lora is None and layer.quantized is None


def _multiply_each(
    product: Callable[..., tuple[Tensor, ...]], kernels: Kernels, x: Tensor, matrices: Sequence[Matrix],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:  # fmt: skip
    """Multiply x by each matrix: one call for all quantized ones, one for the others."""
    outputs: dict[int, Tensor] = {}
    for quantized, multiply in ((True, kernels.quantized_linears), (False, product)):
        indices = [index for index, matrix in enumerate(matrices) if isinstance(matrix, QuantizedMatrix) == quantized]
        if indices:
            products = multiply(x, [matrices[index] for index in indices], [biases[index] for index in indices])
            outputs.update(zip(indices, products, strict=True))
    return [outputs[index] for index in range(len(matrices))]


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
