"""Matrices of a model that are codes and scales: where they stand.

A `Linear` with `quantized` has no weight; a stack of experts `up` is None beside `up_quantized`. An adapter, a bias and
whatever runs around the layer stay as they are. The tensors are buffers: nothing trains or shards them.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.kernels.cut_matrices import cut
from meshwright.kernels.quantized_matrix import PARTS, QuantizedMatrix
from meshwright.spec.boxes import Box
from meshwright.spec.code_cuts import CodesCut
from meshwright.spec.inventory import parameters
from meshwright.spec.quantization_schemes import Scheme
from meshwright.spec.shape import ModelShape


class QuantizedWeight(nn.Module):
    """The tensors of one matrix (rows, columns), or of a stack of them."""

    codes: Tensor

    def __init__(
        self,
        scheme: Scheme,
        size: tuple[int, ...],
        kept: int,
        dtype: torch.dtype,
        *,
        keeps_copies: bool = True,
        prefer: str = "auto",
    ) -> None:
        super().__init__()
        *stack, rows, columns = size
        self.scheme, self.size, self.keeps_copies, self.prefer = scheme, size, keeps_copies, prefer
        self.part: CodesCut | None = None
        """What of the matrix is here; None = all."""
        for name, (dims, kind) in scheme.sizes(rows, columns, stack, kept=kept).items():
            self.register_buffer(name, torch.empty(dims, dtype=getattr(torch, kind)))
        if kept:
            self.register_buffer("kept", torch.empty(*stack, rows, kept, dtype=dtype))
        self._matrix: QuantizedMatrix | None = None

    def cut(self, box: Box) -> None:
        """Have room for a part of the matrix, before there is memory."""
        self.part = CodesCut(scheme=self.scheme, box=box)
        for name, (dims, kind) in self.part.sizes().items():
            self.register_buffer(name, torch.empty(dims, dtype=getattr(torch, kind), device=self.codes.device))

    @property
    def matrix(self) -> QuantizedMatrix:
        """What products take. Made once the tensors are where they stay."""
        if self._matrix is None:
            parts = {name: getattr(self, name) for name in PARTS if hasattr(self, name)}
            columns = self.size[-1] if self.part is None else self.part.box.sizes[-1]
            self._matrix = QuantizedMatrix(
                scheme=self.scheme, size_in=columns, keeps_copies=self.keeps_copies, prefer=self.prefer, **parts
            )
            if self.part is not None and not self.part.is_whole:
                self._matrix.before, self._matrix.places = self.part.before, self.part.places
        return self._matrix

    def take(self, matrix: QuantizedMatrix) -> None:
        """Have its tensors be those of a matrix of its scheme and size; of a part, that part of them."""
        matrix = matrix if self.part is None else cut(matrix, self.part)
        for name, tensor in matrix.tensors.items():
            getattr(self, name).copy_(tensor)


def quantizable(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and size of every matrix that schemes are for: those between hidden states. Embeddings, head, norms,
    biases and routers are not among them."""
    return {one.name: one.shape for one in parameters(shape.base) if one.matrices is not None}


def place(name: str) -> str:
    """Of a matrix's module in the model: layers.3.mlp.up.weight -> layers.3.mlp.up.quantized."""
    return name.removesuffix(".weight") + (".quantized" if name.endswith(".weight") else "_quantized")


def frozen_schemes(shape: ModelShape) -> dict[str, Scheme]:
    """Of each frozen matrix that is held as codes beside adapters."""
    scheme = None if shape.lora is None else shape.lora.scheme
    return {one.name: scheme for one in parameters(shape) if scheme is not None and one.scheme}


def frozen_codes(models: Iterable[nn.Module], shape: ModelShape) -> dict[str, QuantizedWeight]:
    """The same matrices where they stand, of those that these parts of a model hold."""
    places = {place(name): name for name in frozen_schemes(shape)}
    found = (named for model in models for named in model.named_modules())
    return {places[name]: one for name, one in found if name in places and isinstance(one, QuantizedWeight)}


def put_quantized(
    model: nn.Module, shape: ModelShape, schemes: Mapping[str, Scheme], kept: Mapping[str, int], dtype: torch.dtype,
    *, keeps_copies: bool = True,
) -> None:  # fmt: skip
    """Give matrices of a skeleton (a Transformer), by name, codes in place of a weight. `kept`: how many columns of
    which are in `dtype`. Not `keeps_copies`: products restore a matrix each time."""
    sizes, kernels = quantizable(shape), cast(Any, model.kernels)
    with torch.device("meta"):
        for name, scheme in schemes.items():
            where, _, leaf = place(name).rpartition(".")
            module = model.get_submodule(where)
            module.register_parameter(name.rpartition(".")[2], None)
            made = QuantizedWeight(
                scheme, sizes[name], kept.get(name, 0), dtype, keeps_copies=keeps_copies, prefer=kernels.prefer
            )
            setattr(module, leaf, made)
