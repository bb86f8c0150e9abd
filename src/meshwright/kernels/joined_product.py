"""Products of a GPU with matrices that do not change and read one input: side by side in memory they are one product.

A product of few columns leaves most of a GPU idle, and each one is a launch. The matrices are moved once and stay what
they were, as views of one tensor.
"""

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.prepared_product import Matrix
from meshwright.kernels.quantized_linear import quantized_linears
from meshwright.kernels.quantized_matrix import QuantizedMatrix


def joined_product(matrices: Sequence[Matrix], biases: Sequence[Tensor | None]) -> "JoinedProduct | None":
    """Move matrices (N, K) side by side in memory. Returns None where they differ in kind or share memory with others.

    Shared memory would not be freed by the move.
    """
    plain = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    coded = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    joined: Matrix | None = None
    if len(plain) == len(matrices):
        joined = _side_by_side(plain)
    elif len(coded) == len(matrices):
        joined = _joined_codes(coded)
    if joined is None:
        return None
    present = [bias for bias in biases if bias is not None]
    bias = _side_by_side(present) if len(present) == len(biases) else None
    return None if present and bias is None else JoinedProduct(joined, bias)


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor of the rows of all. Each becomes a view of its part, which avoids a second copy."""
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first
    if any(tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:] for tensor in tensors):
        return None
    places = [tensor.storage_offset() for tensor in tensors]
    ends = [tensor.storage_offset() + tensor.numel() for tensor in tensors]
    contiguous = all(tensor.is_contiguous() for tensor in tensors)
    shared = {compat.storage_key(tensor.untyped_storage()) for tensor in tensors}
    if len(shared) == 1 and contiguous and places[1:] == ends[:-1]:  # by an engine before this tensor
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    if not contiguous or any(tensor.untyped_storage().nbytes() != tensor.nbytes for tensor in tensors):
        return None
    whole = torch.cat([tensor.detach() for tensor in tensors])
    for tensor, part in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = part
    return whole


def _joined_codes(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix | None:
    """Join matrices of codes.

    Scales that are codes themselves become numbers, as products need them anyway. Those of fp8 products become fp32,
    which each product would convert.
    """
    first = matrices[0]
    if len(matrices) == 1 and first.scheme.activations != "fp8":
        return first
    for matrix in matrices:
        if matrix.scheme != first.scheme or matrix.before or matrix.places is not None or matrix.columns is not None:
            return None
        if matrix.order is not None:
            return None
        if matrix.codes.dim() != 2 or not matrix.keeps_copies or (matrix.zeros is None) != (first.zeros is None):
            return None
    codes = _side_by_side([matrix.codes for matrix in matrices])
    if codes is None:
        return None
    if first.outer is not None:
        scales: Tensor | None = torch.cat([matrix.every_scale() for matrix in matrices])
    else:
        scales = _side_by_side([matrix.scales for matrix in matrices])
        scales = scales.float() if scales is not None and first.scheme.activations == "fp8" else scales
    zeros = (
        _side_by_side([matrix.zeros for matrix in matrices if matrix.zeros is not None])
        if first.zeros is not None
        else None
    )
    if scales is None or (zeros is None) != (first.zeros is None):
        return None
    return QuantizedMatrix(
        scheme=first.scheme, size_in=first.size_in, codes=codes, scales=scales, zeros=zeros, prefer=first.prefer
    )


@final
class JoinedProduct:
    """One GPU product with matrices that lie side by side. Its columns are those of each product."""

    panels = None
    bytes = 0
    """Extra memory: none, it is no copy."""

    def __init__(self, matrix: Matrix, bias: Tensor | None) -> None:
        """Take `matrix` (N of all, K) and `bias` (N of all,) of its dtype."""
        self._matrix, self._bias = matrix, bias

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply as a PreparedProduct."""
        if isinstance(self._matrix, Tensor):
            return F.linear(rows, self._matrix, self._bias)
        return quantized_linears(rows, [self._matrix], [self._bias])[0]
