"""Weights that are rounded in every product, and trained all the same (quantization-aware training).

    forward    y = x Q(W)^T        Q(W): what the codes of W stand for, by the function that writes them; of int8 Q(x)
    backward   dL/dW = dL/dQ(W)    the straight-through estimator (Bengio et al. 2013, arXiv:1308.3432)

W keeps the small steps of the optimizer. What is exported is codes of the last W: those that the last product had.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels.quantized_linear import row_codes
from meshwright.kernels.weight_codes import coded
from meshwright.model.linear import Linear, Matrix
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.quantization_schemes import SCHEMES, Scheme
from meshwright.spec.shape import ModelShape


class _StraightThrough(torch.autograd.Function):
    """Q(W), with the gradient of W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scheme: Scheme) -> Tensor:
        return coded(weight.detach(), scheme).restored(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def straight_through(weight: Tensor, scheme: Scheme) -> Tensor:
    """What a matrix (N, K) is when it is written in a scheme and read back, in its own dtype; differentiable."""
    found: Tensor = _StraightThrough.apply(weight, scheme)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return found


class _RoundedRows(torch.autograd.Function):
    """Q(x), with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        codes, scales = row_codes(x.reshape(-1, x.shape[-1]))
        return codes.mul_(scales).to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def rounded_rows(x: Tensor) -> Tensor:
    """What 8-bit products make of activations (..., K): whole numbers with a scale for each row, in x's dtype;
    differentiable."""
    found: Tensor = _RoundedRows.apply(x)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return found


class FakeQuantized:
    """The Weight of a layer whose matrix is rounded in each product."""

    adds_bias = False

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def read(self, x: Tensor) -> Tensor:
        """The input, rounded token by token where the scheme's products round it."""
        return rounded_rows(x) if self.scheme.activations == "int8" else x

    def matrices(self, weight: Matrix) -> Sequence[Matrix]:
        """The rounded one."""
        assert isinstance(weight, Tensor), "codes are not trained"
        return (straight_through(weight, self.scheme),)

    def result(self, layer: Linear, x: Tensor, products: Sequence[Tensor]) -> Tensor:
        """The product."""
        return products[0]


def put_fake_quantization(models: Iterable[nn.Module], shape: ModelShape, scheme: str) -> None:
    """Have parts of a model round every matrix that `meshwright quantize` rounds."""
    names = {name.removesuffix(".weight") for name in quantizable(shape)}
    for model in models:
        for name, layer in model.named_modules():
            if name in names and isinstance(layer, Linear):
                layer.lora = FakeQuantized(SCHEMES[scheme])
