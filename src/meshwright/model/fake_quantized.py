"""Quantization-aware training: weights that are rounded in every product.

    forward    y = x Q(W)^T        Q(W): W written as codes and read back, by the code that exports it; for int8 also
    Q(x)
    backward   dL/dW = dL/dQ(W)    the straight-through estimator (Bengio et al. 2013, arXiv:1308.3432)

W keeps the small steps of the optimizer. The export holds the codes of the last W, those of the last product.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels.linear.weight_gradients import stand_for
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import Largest, MatrixPart, coded, part_of_rows
from meshwright.kernels.quantized.quantized_linear import row_codes
from meshwright.model.feed_forward import Experts
from meshwright.model.layers import Linear, Matrix
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme
from meshwright.spec.model.shape import ModelShape

Coding = Callable[[Tensor], QuantizedMatrix]
"""Function from a matrix (N, K), or a stack (X, N, K), to its codes."""


class _StraightThrough(torch.autograd.Function):
    """Q(W) with the gradient of W. There is none where it is deferred."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, code: Coding) -> Tensor:
        ctx.set_materialize_grads(False)
        return code(weight.detach()).restored(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return gradient, None


def straight_through(weight: Tensor, scheme: Scheme, part: MatrixPart | None = None) -> Tensor:
    """Round a matrix (N, K), or a `part` of one, to a scheme and back, in its dtype. Differentiable."""
    code = part.coded if part else lambda whole: coded(whole, scheme)
    restored: Tensor = _StraightThrough.apply(weight, code)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return stand_for(restored, weight)


class _RoundedRows(torch.autograd.Function):
    """Q(x) with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Largest | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        codes, scales = part_of_rows(rows, largest) if largest else row_codes(rows)
        return codes.mul_(scales).to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def rounded_rows(x: Tensor, largest: Largest | None = None) -> Tensor:
    """Round activations (..., K) to integers with a scale per row, over ranks with `largest`. Differentiable."""
    rounded: Tensor = _RoundedRows.apply(x, largest)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return rounded


class FakeQuantized:
    """Weight of a layer, or of a stack of experts, whose matrix is rounded in each product."""

    adds_bias = False

    def __init__(self, scheme: Scheme, part: MatrixPart | None = None, over_inputs: Largest | None = None) -> None:
        """Set the scheme. `part` is that of straight_through, `over_inputs` the `largest` of rounded_rows."""
        self.scheme, self.part, self.over_inputs = scheme, part, over_inputs

    def read(self, x: Tensor) -> Tensor:
        """Return the input, rounded token by token where the scheme's products round it."""
        return rounded_rows(x, self.over_inputs) if self.scheme.activations == "int8" else x

    def matrices(self, weight: Matrix) -> Sequence[Matrix]:
        """Return the rounded matrix."""
        assert isinstance(weight, Tensor), "codes are not trained"
        return (straight_through(weight, self.scheme, self.part),)

    def sole_matrix(self, weight: Tensor) -> Tensor | None:
        """Return the rounded matrix, or None if the input is rounded too."""
        return None if self.scheme.activations == "int8" else straight_through(weight, self.scheme, self.part)

    def combine(self, layer: Linear, x: Tensor, products: Sequence[Tensor], keys: Tensor | None = None) -> Tensor:
        """Return the product."""
        return products[0]


def put_fake_quantization(
    models: Iterable[nn.Module], shape: ModelShape, scheme: str, cut: Mapping[str, FakeQuantized] | None = None
) -> None:
    """Make parts of a model round every matrix that `meshwright quantize` rounds.

    `cut` has the rounding, by name, of matrices of which other ranks hold parts.
    """
    named = {name: module for model in models for name, module in model.named_modules()}
    for name in quantizable(shape):
        rounding = (cut or {}).get(name) or FakeQuantized(SCHEMES[scheme])
        where, _, leaf = name.rpartition(".")
        module = named.get(where)
        if isinstance(module, Experts):
            module.rounding[leaf] = rounding
        elif isinstance(module, Linear):
            module.lora = rounding
