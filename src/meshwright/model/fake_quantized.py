"""Weights that are rounded in every product, and trained all the same (quantization-aware training).

    forward    y = x Q(W)^T        Q(W): what the codes of W stand for, by the function that writes them
    backward   dL/dW = dL/dQ(W)    the straight-through estimator (Bengio et al. 2013, arXiv:1308.3432)

W keeps the small steps of the optimizer. What is exported is codes of the last W: those that the last product had.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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


class FakeQuantized:
    """The Weight of a layer whose matrix is rounded in each product."""

    adds_bias = False

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

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
