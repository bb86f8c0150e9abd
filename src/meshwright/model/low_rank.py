"""Low-rank adapters on frozen matrices: LoRA (arXiv:2106.09685), rsLoRA, DoRA (arXiv:2402.09353).

    LoRA    y = x W^T + s (x A^T) B^T
    DoRA    y = m / |W + s B A| * (x W^T + s (x A^T) B^T)        m (out,) trained; the norm, of rows, as a constant

A is multiplied in the same product as W, so x is entered, read and saved once. On a rank that holds a part of W's rows
or columns, each sum above is its part of the whole one (spec/weights/inventory.py says who holds what).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.linear.linear import product_dtype
from meshwright.kernels.norm.dropout import dropout, site_key
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.model.feed_forward import Experts
from meshwright.model.layers import Linear, Matrix
from meshwright.model.quantized_weights import frozen_schemes, put_quantized
from meshwright.model.seams import same
from meshwright.spec.model.shape import LoRAShape, ModelShape
from meshwright.spec.weights.inventory import parameters

TINY = 2.0**-100
"""Least squared length of a row. A row of zeros, as pruning leaves it, has this length and stays zero."""


class LoRA(nn.Module):
    """Weight W with a low-rank sum added to it. Its parameters have the sizes of a whole layer."""

    def __init__(self, lora: LoRAShape, size_in: int, size_out: int) -> None:
        super().__init__()
        self.scale, self.dropout = lora.scale, lora.dropout
        self.site, self.first_input = 0, 0
        """Number of this matrix in its layer for dropout, and of the first input held here."""
        self.a = nn.Parameter(torch.empty(lora.rank, size_in))
        self.b = nn.Parameter(torch.empty(size_out, lora.rank))
        self.adds_bias = lora.dora
        if lora.dora:
            self.magnitude = nn.Parameter(torch.empty(size_out))
        self.over_inputs: Callable[[Tensor], Tensor] = same
        """Sum (...) over this rank's inputs -> over all inputs, for a matrix whose columns are split over ranks."""

    @property
    def _drops(self) -> bool:
        return self.dropout > 0 and self.training

    def read(self, x: Tensor) -> Tensor:
        """Return the input unchanged."""
        return x

    def matrices(self, weight: Matrix) -> Sequence[Matrix]:
        """Return W and A. With dropout A reads another input than W, so it is not part of the product."""
        return (weight,) if self._drops else (weight, self.a)

    def sole_matrix(self, weight: Tensor) -> Tensor | None:
        """Return None: the result is a sum."""
        return None

    def combine(self, layer: Linear, x: Tensor, products: Sequence[Tensor], keys: Tensor | None = None) -> Tensor:
        """Map x (..., in) and its products to (..., out)."""
        linear = layer.kernels.linear
        base_product = products[0]
        # Without dropout A x came with W x, from one product.
        narrow = (
            products[1]
            if not self._drops
            else linear(dropout(x, self.dropout, keys, self.site, self.first_input), self.a)
        )
        output: Tensor = base_product + linear(narrow * self.scale, self.b)
        if not self.adds_bias:
            return output
        output = output * (self.magnitude / self.norms(self.whole(layer.matrix))).to(output.dtype)
        return output if layer.local_bias is None else output + layer.local_bias

    def whole(self, matrix: Matrix) -> Tensor:
        """Return the matrix (out, in), restored from codes as products restore it."""
        return matrix.restored(self.a.dtype) if isinstance(matrix, QuantizedMatrix) else matrix

    def row_squares(self, weight: Tensor) -> Tensor:
        """Return |W|^2 of each row (out,) fp32, over all inputs."""
        squares: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        return self.over_inputs(squares)

    @torch.no_grad()
    def norms(self, weight: Tensor) -> Tensor:
        """Return |W + s B A| of each row (out,) fp32, without building that matrix."""
        a, b = self.a.float(), self.b.float()
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        dtype = product_dtype(weight)
        cross_products = F.linear(self.a.to(dtype), weight.to(dtype)).float()  # (rank, out)
        # One collective for all three sums.
        whole = self.over_inputs(torch.cat((squares, cross_products.flatten(), F.linear(a, a).flatten())))
        squares, flat, gram = whole.split((len(squares), cross_products.numel(), len(a) ** 2))
        mixed = (flat.view_as(cross_products).t() * b).sum(1)
        adapter_squares = (b @ gram.view(len(a), len(a)) * b).sum(1)
        squares = squares + 2 * self.scale * mixed + self.scale**2 * adapter_squares
        norms: Tensor = squares.clamp(min=TINY).sqrt()  # for a row of zeros rounding may leave less
        return norms


class ExpertLoRA(nn.Module):
    """Low-rank parameters of a stack of experts: A (X, rank, in), B (X, out, rank)."""

    def __init__(self, lora: LoRAShape, size: Sequence[int]) -> None:
        super().__init__()
        experts, size_out, size_in = size
        self.scale, self.dropout = lora.scale, lora.dropout
        self.site, self.first_input = 0, 0
        self.a = nn.Parameter(torch.empty(experts, lora.rank, size_in))
        self.b = nn.Parameter(torch.empty(experts, size_out, lora.rank))


def merge_adapter(weight: Tensor, low: Mapping[str, Tensor], lora: LoRAShape) -> Tensor:
    """Return the matrix (out, in), or stack (X, out, in), that equals a weight and its adapter."""
    sum_matrix = weight + lora.scale * (low["b"] @ low["a"])
    if "magnitude" in low:
        lengths = torch.linalg.vector_norm(sum_matrix, dim=1).clamp(min=TINY**0.5)
        sum_matrix = sum_matrix * (low["magnitude"] / lengths).unsqueeze(1)
    return sum_matrix


def add_adapters(model: nn.Module, shape: ModelShape) -> None:
    """Add the adapters of a shape to a whole model, and freeze everything else."""
    if shape.lora is None:
        return
    inventory = parameters(shape)
    for name in dict.fromkeys(parameter.adapts for parameter in inventory if parameter.adapts):
        where, _, leaf = name.rpartition(".")
        module = model.get_submodule(where)
        if isinstance(module, Experts):
            adapter: LoRA | ExpertLoRA = ExpertLoRA(shape.lora, getattr(module, leaf).shape)
            setattr(module, f"{leaf}_lora", adapter)
        else:
            assert isinstance(module, Linear)
            adapter = module.lora = LoRA(shape.lora, module.in_features, module.out_features)
        # The same for all layers, so that these share compiled code. Keys of tokens differ between layers.
        adapter.site = site_key(name.split(".", 2)[2])
    # Codes last, because adapters take their sizes from the matrices.
    put_quantized(model, shape, frozen_schemes(shape), {}, torch.float32, keeps_copies=False)
    trained = {parameter.name for parameter in inventory if parameter.trained}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in trained)
