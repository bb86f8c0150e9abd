"""Low-rank adapters beside frozen matrices: LoRA (arXiv:2106.09685), rsLoRA, DoRA (arXiv:2402.09353).

    LoRA    y = x W^T + s (x A^T) B^T
    DoRA    y = m / |W + s B A| * (x W^T + s (x A^T) B^T)        m (out,) trained; the norm, of rows, as a constant

A stands beside W in the product that reads x, so that x is entered, read and kept once. On a rank that holds a part of
W's rows or columns every sum above is its part of the whole one (spec/inventory.py says who holds what).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.dropout import dropout
from meshwright.kernels.linear import product_dtype
from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.model.linear import Linear, Matrix
from meshwright.model.moe import Experts
from meshwright.model.quantized_weights import frozen_schemes, put_quantized
from meshwright.model.seams import same
from meshwright.spec.inventory import parameters
from meshwright.spec.lora import LoRAShape
from meshwright.spec.shape import ModelShape

TINY = 2.0**-100
"""The least square of a length: a row of zeros, as pruning leaves them, has one and stays what it is."""


class LoRA(nn.Module):
    """A Weight: W with a low-rank sum beside it. The sizes of its parameters are those of a whole layer."""

    def __init__(self, lora: LoRAShape, size_in: int, size_out: int) -> None:
        super().__init__()
        self.scale, self.dropout = lora.scale, lora.dropout
        self.a = nn.Parameter(torch.empty(lora.rank, size_in))
        self.b = nn.Parameter(torch.empty(size_out, lora.rank))
        self.adds_bias = lora.dora
        if lora.dora:
            self.magnitude = nn.Parameter(torch.empty(size_out))
        self.over_inputs: Callable[[Tensor], Tensor] = same
        """Sums (...) over this rank's inputs -> over all inputs; of a matrix that is split by columns over ranks."""

    @property
    def _drops(self) -> bool:
        return self.dropout > 0 and self.training

    def read(self, x: Tensor) -> Tensor:
        """The input."""
        return x

    def matrices(self, weight: Matrix) -> Sequence[Matrix]:
        """W and A; what reads another input than W, with dropout, is no part of one product."""
        return (weight,) if self._drops else (weight, self.a)

    def alone(self, weight: Tensor) -> Tensor | None:
        """Never: there is the sum."""
        return None

    def result(self, layer: Linear, x: Tensor, products: Sequence[Tensor]) -> Tensor:
        """As Weight."""
        linear = layer.kernels.linear
        whole = products[0]
        narrow = linear(dropout(x, self.dropout), self.a) if self._drops else products[1]
        found: Tensor = whole + linear(narrow * self.scale, self.b)
        if not self.adds_bias:
            return found
        found = found * (self.magnitude / self.norms(self.whole(layer.matrix))).to(found.dtype)
        return found if layer.local_bias is None else found + layer.local_bias

    def whole(self, matrix: Matrix) -> Tensor:
        """The matrix (out, in), restored as products restore it."""
        return matrix.restored(self.a.dtype) if isinstance(matrix, QuantizedMatrix) else matrix

    def row_squares(self, weight: Tensor) -> Tensor:
        """|W|^2 of each row (out,) fp32, over all inputs."""
        found: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        return self.over_inputs(found)

    @torch.no_grad()
    def norms(self, weight: Tensor) -> Tensor:
        """|W + s B A| of each row (out,) fp32, without making that matrix."""
        a, b = self.a.float(), self.b.float()
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        dtype = product_dtype(weight)
        of_both = F.linear(self.a.to(dtype), weight.to(dtype)).float()  # (rank, out)
        whole = self.over_inputs(torch.cat((squares, of_both.flatten(), F.linear(a, a).flatten())))
        squares, flat, gram = whole.split((len(squares), of_both.numel(), len(a) ** 2))
        crossed = (flat.view_as(of_both).t() * b).sum(1)
        own = (b @ gram.view(len(a), len(a)) * b).sum(1)
        squares = squares + 2 * self.scale * crossed + self.scale**2 * own
        norms: Tensor = squares.clamp(min=TINY).sqrt()  # of a row of zeros rounding may leave less
        return norms


class ExpertLoRA(nn.Module):
    """The same of a stack of experts: A (X, rank, in), B (X, out, rank)."""

    def __init__(self, lora: LoRAShape, size: Sequence[int]) -> None:
        super().__init__()
        experts, size_out, size_in = size
        self.scale, self.dropout = lora.scale, lora.dropout
        self.a = nn.Parameter(torch.empty(experts, lora.rank, size_in))
        self.b = nn.Parameter(torch.empty(experts, size_out, lora.rank))


def merged(weight: Tensor, low: Mapping[str, Tensor], lora: LoRAShape) -> Tensor:
    """The matrix (out, in), or the stack (X, out, in), that a model without adapters has in its place."""
    found = weight + lora.scale * (low["b"] @ low["a"])
    if "magnitude" in low:
        lengths = torch.linalg.vector_norm(found, dim=1).clamp(min=TINY**0.5)
        found = found * (low["magnitude"] / lengths).unsqueeze(1)
    return found


def add_adapters(model: nn.Module, shape: ModelShape) -> None:
    """Give a whole model the adapters of its shape, and have nothing else be trained."""
    if shape.lora is None:
        return
    known = parameters(shape)
    for name in dict.fromkeys(one.adapts for one in known if one.adapts):
        where, _, leaf = name.rpartition(".")
        module = model.get_submodule(where)
        if isinstance(module, Experts):
            setattr(module, f"{leaf}_lora", ExpertLoRA(shape.lora, getattr(module, leaf).shape))
        else:
            assert isinstance(module, Linear)
            module.lora = LoRA(shape.lora, module.in_features, module.out_features)
    put_quantized(model, shape, frozen_schemes(shape), {}, torch.float32, keeps_copies=False)
    trained = {one.name for one in known if one.trained}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
