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
    """Move matrices (N, K) side by side in memory. None where they are of several kinds, or share memory with others,
    which would keep it."""
    plain = [one for one in matrices if isinstance(one, Tensor)]
    coded = [one for one in matrices if isinstance(one, QuantizedMatrix)]
    matrix: Matrix | None = None
    if len(plain) == len(matrices):
        matrix = _side_by_side(plain)
    elif len(coded) == len(matrices):
        matrix = _joined_codes(coded)
    if matrix is None:
        return None
    given = [one for one in biases if one is not None]
    bias = _side_by_side(given) if len(given) == len(biases) else None
    return None if given and bias is None else JoinedProduct(matrix, bias)


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor of the rows of all. Each becomes a view of its part, so that nothing is held twice."""
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first
    if any(one.dtype != first.dtype or one.shape[1:] != first.shape[1:] for one in tensors):
        return None
    places = [one.storage_offset() for one in tensors]
    ends = [one.storage_offset() + one.numel() for one in tensors]
    contiguous = all(one.is_contiguous() for one in tensors)
    shared = {compat.storage_key(one.untyped_storage()) for one in tensors}
    if len(shared) == 1 and contiguous and places[1:] == ends[:-1]:  # by an engine before this one
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    if not contiguous or any(one.untyped_storage().nbytes() != one.nbytes for one in tensors):
        return None
    whole = torch.cat([one.detach() for one in tensors])
    for one, part in zip(tensors, whole.split([len(one) for one in tensors]), strict=True):
        one.data = part
    return whole


def _joined_codes(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix | None:
    """One matrix of codes; scales that are codes themselves become numbers, as products make them anyway, and those of
    8-bit floating-point products fp32, which each product would convert."""
    first = matrices[0]
    if len(matrices) == 1 and first.scheme.activations != "fp8":
        return first
    for one in matrices:
        if one.scheme != first.scheme or one.before or one.places is not None or one.columns is not None:
            return None
        if one.order is not None:
            return None
        if one.codes.dim() != 2 or not one.keeps_copies or (one.zeros is None) != (first.zeros is None):
            return None
    codes = _side_by_side([one.codes for one in matrices])
    if codes is None:
        return None
    if first.outer is not None:
        scales: Tensor | None = torch.cat([one.every_scale() for one in matrices])
    else:
        scales = _side_by_side([one.scales for one in matrices])
        scales = scales.float() if scales is not None and first.scheme.activations == "fp8" else scales
    zeros = _side_by_side([one.zeros for one in matrices if one.zeros is not None]) if first.zeros is not None else None
    if scales is None or (zeros is None) != (first.zeros is None):
        return None
    return QuantizedMatrix(
        scheme=first.scheme, size_in=first.size_in, codes=codes, scales=scales, zeros=zeros, prefer=first.prefer
    )


@final
class JoinedProduct:
    """On a GPU: one product with matrices that lie side by side. Its result is that of each, in columns."""

    panels = None
    bytes = 0
    """It is no copy."""

    def __init__(self, matrix: Matrix, bias: Tensor | None) -> None:
        """`matrix` (N of all, K), `bias` (N of all,) of its dtype."""
        self._matrix, self._bias = matrix, bias

    def __call__(self, rows: Tensor) -> Tensor:
        """As PreparedProduct."""
        if isinstance(self._matrix, Tensor):
            return F.linear(rows, self._matrix, self._bias)
        return quantized_linears(rows, [self._matrix], [self._bias])[0]
