"""Products of few rows with fixed matrices: copies of them in the order in which a CPU reads them.

Several matrices that read the same input are one product. The copy depends on the matrices:

    plain numbers      panels of 16 columns for compiled loops. Without these (K, N), which MKL multiplies few rows with
                       up to 2.5 times as fast as with (N, K), or oneDNN's own order where torch's BLAS library is slow
                       (compat.blas_is_slow). In fp32 where this CPU has no units for 16 bits: such matrices would be
                       widened for each product
    codes, int8 rows   oneDNN's order of 8-bit numbers; for few rows also panels, if there are compiled loops.
                       Rows have a scale each, and sums are of whole numbers: a row's result depends on no other row
    up to 4 bits       panels of codes, if there are compiled loops; for very many rows restored for each product
    other codes        as plain numbers, restored once

None has a gradient. A result is rounded to the dtype of its rows once.
"""

from collections.abc import Sequence
from typing import Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.compat import integers
from meshwright.kernels.c import serving_library
from meshwright.kernels.c.serving_library import ROWS, ROWS_BESIDE_BF16, Loops, Panels
from meshwright.kernels.linear import cpu_product
from meshwright.kernels.linear.linear import needs_wide, products
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantized_linear import (
    INT8_INPUTS,
    code_panels,
    exact_product,
    quantized_linears,
    quantized_linears_reference,
    row_codes,
    weights_in_steps,
)

Matrix = Tensor | QuantizedMatrix
"""(N, K), or codes and scales that represent it."""
LOOKED_UP_ROWS = 1024
"""Rows up to which looking codes up costs less than restoring the matrix for a product."""


class PreparedProduct(Protocol):
    """x times the transposed matrices, side by side, plus their biases."""

    bytes: int
    """Size of the copies of the matrices."""

    @property
    def panels(self) -> Panels | None:
        """Panels that compiled loops read, where they are the whole product. None = there are none."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows (M, K). Returns (M, N of all)."""


def prepared_product(matrices: Sequence[Matrix], biases: Sequence[Tensor | None]) -> PreparedProduct | None:
    """Prepare a product with matrices (N, K) on a CPU. Returns None where the plain product is best."""
    first = matrices[0]
    if (first if isinstance(first, Tensor) else first.codes).device.type != "cpu":
        return None
    coded = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    plain = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    if plain and coded:
        return None
    sizes = [len(matrix) if isinstance(matrix, Tensor) else matrix.size_out for matrix in matrices]
    bias = _joined_bias(biases, sizes)
    if plain:
        return _number_product(plain, biases, bias)
    if any(matrix.order is not None for matrix in coded):
        return _ordered_product(coded, biases)
    if all(matrix.scheme.activations == "int8" for matrix in coded):
        return _int8_product(coded, bias) if _can_join_int8(coded) else None
    if any(matrix.scheme.activations == "int8" or not matrix.keeps_copies for matrix in coded):
        return None
    if (loops := serving_library.compiled()) is not None and (panels := code_panels(loops, coded, bias)) is not None:
        return CodeProduct(loops, panels)
    return _number_product([matrix.dequantized() for matrix in coded], biases, bias, are_copies=True)


def _ordered_product(matrices: Sequence[QuantizedMatrix], biases: Sequence[Tensor | None]) -> PreparedProduct | None:
    """Prepare matrices whose codes stand in an order of inputs. Those of one input share the order."""
    order = matrices[0].order
    if order is None or not all(matrix.order is not None and torch.equal(matrix.order, order) for matrix in matrices):
        return None
    product = prepared_product([matrix.in_order_of_codes for matrix in matrices], biases)
    return None if product is None else OrderedProduct(product, order)


def reference(matrices: Sequence[Matrix], biases: Sequence[Tensor | None], rows: Tensor) -> Tensor:
    """Compute a prepared product by plain ones: rows (M, K) -> (M, N of all)."""
    outputs = []
    for matrix, bias in zip(matrices, biases, strict=True):
        if isinstance(matrix, Tensor):
            wide = F.linear(rows.float(), matrix.float(), None if bias is None else bias.float())
            outputs.append(wide.to(rows.dtype))
        else:
            outputs += quantized_linears_reference(rows, [matrix], [bias])
    return torch.cat(outputs, dim=-1)


def _joined_bias(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Join biases to (N of all,) fp32, zero where there is none. Returns None without any."""
    like = next((bias.detach().float() for bias in biases if bias is not None), None)
    if like is None:
        return None
    pairs = zip(biases, sizes, strict=True)
    return torch.cat([like.new_zeros(size) if bias is None else bias.detach().float() for bias, size in pairs])


def _number_product(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], bias: Tensor | None, are_copies: bool = False
) -> PreparedProduct | None:
    """Prepare plain weights. `bias`: of all; `are_copies`: the weights are copies that nobody else holds."""
    weights = [weight.detach() for weight in weights]
    wide = weights[0].dtype == torch.float32 or needs_wide(weights[0])
    if serving_library.compiled() is not None:
        # bf16 panels hold pairs of inputs, so K must be even.
        narrow = weights[0].dtype == torch.bfloat16 and not weights[0].shape[1] % 2
        if narrow or wide:
            whole = torch.cat([weight if narrow else weight.float() for weight in weights])
            if (panels := Panels.of_numbers(whole, bias)) is not None:
                most = ROWS if wide else ROWS_BESIDE_BF16
                return PanelProduct(panels, weights, biases, most=most, are_copies=are_copies)
    if not wide:
        return None
    whole = torch.cat([weight.float() for weight in weights])
    return OnednnProduct(whole, bias) if compat.blas_is_slow() else TransposedProduct(whole, bias)


@final
class PanelProduct:
    """A product of compiled loops for few rows, and of `products` for more."""

    def __init__(
        self, panels: Panels, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, most: int = ROWS,
        are_copies: bool = False,
    ) -> None:  # fmt: skip
        """Take `weights` (N of each, K) and the `panels` of all of them.

        `most`: rows up to which loops run; `are_copies`: as in _number_product.
        """
        self.panels, self._weights, self._biases, self._most = panels, weights, biases, most
        self.bytes = panels.bytes + are_copies * sum(weight.nbytes for weight in weights)

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply as a PreparedProduct."""
        loops = serving_library.loops()
        if loops is not None and loops.few(rows.shape[0], self._most) and rows.device.type == "cpu":
            return loops.multiply(rows.float().contiguous(), self.panels).to(rows.dtype)
        outputs = products(rows, self._weights, self._biases)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


@final
class CodeProduct:
    """A product of compiled loops, and of torch with restored numbers for very many rows."""

    def __init__(self, loops: Loops, panels: Panels) -> None:
        """Take the loops that restore `panels`."""
        self._loops, self.panels = loops, panels
        self.bytes = panels.bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply as a PreparedProduct."""
        loops = serving_library.loops()
        if loops is not None and loops.few(rows.shape[0], LOOKED_UP_ROWS):
            return loops.multiply(rows.float().contiguous(), self.panels).to(rows.dtype)
        return cpu_product.linear(rows.float(), self._loops.restored(self.panels), self.panels.bias).to(rows.dtype)


@final
class OrderedProduct:
    """A product whose inputs are reordered first."""

    panels = None

    def __init__(self, product: PreparedProduct, order: Tensor) -> None:
        """Take `order` (K,) int32."""
        self._product, self._order = product, order
        self.bytes = product.bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply as a PreparedProduct."""
        return self._product(rows.index_select(1, self._order))


@final
class TransposedProduct:
    """A product with a matrix stored as (K, N)."""

    panels = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take `weight` (N, K) fp32 and `bias` (N,)."""
        self._transposed, self._bias = weight.t().contiguous(), bias
        self.bytes = weight.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply as a PreparedProduct."""
        wide = rows.float()
        y = torch.mm(wide, self._transposed) if self._bias is None else torch.addmm(self._bias, wide, self._transposed)
        return y.to(rows.dtype)


@final
class OnednnProduct:
    """A product with a matrix in oneDNN's own order."""

    panels = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take `weight` (N, K) fp32 and `bias` (N,)."""
        self._packed, self._bias = compat.pack_for_onednn(weight.contiguous()), bias
        self.bytes = weight.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply as a PreparedProduct."""
        return compat.onednn_product(rows.float().contiguous(), self._packed, self._bias).to(rows.dtype)


def _can_join_int8(matrices: Sequence[QuantizedMatrix]) -> bool:
    """Return whether int8 matrices form one product: the same fixed outlier columns, and sizes that fit."""
    first = matrices[0].columns
    if any(matrix.scheme.outliers == "threshold" or matrix.size_in >= INT8_INPUTS for matrix in matrices):
        return False
    if not all(matrix.scheme.symmetric_by_token for matrix in matrices):
        return False
    if not integers.has_int8_product():
        return False
    if first is None or matrices[0].unquantized is None:
        return all(matrix.columns is None or matrix.unquantized is None for matrix in matrices)
    return all(matrix.columns is not None and torch.equal(matrix.columns, first) for matrix in matrices)


@final
class OutlierColumns:
    """Inputs whose weights are not codes."""

    def __init__(self, columns: Tensor, weights: Tensor) -> None:
        """Take columns (O,) and their weights (N, O)."""
        self.columns, self._weights = columns.long(), weights_in_steps(weights)
        self.bytes = self._weights.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows (M, K) fp32. Returns (M, N)."""
        return exact_product(rows.index_select(1, self.columns), self._weights)


@final
class Int8Product:
    """A product of 8-bit rows with 8-bit matrices, by oneDNN.

    Outlier columns are multiplied separately, and exactly.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None = None, outliers: OutlierColumns | None = None
    ):
        """Take codes (N, K) int8, scales (N,) fp32 and bias (N,) of matrices side by side."""
        self._packed, self._scales = integers.pack_int8(codes), scales.contiguous()
        self._zeros = torch.zeros(len(codes), dtype=torch.int64)
        self._outliers, self._bias = outliers, bias
        loops = serving_library.compiled()
        has_loops = loops is not None and loops.has_int8
        # With outliers the bias comes after their product, as in oneDNN's form: the same bits by either library.
        self._panels = Panels.of_int8(codes, self._scales, None if outliers else bias) if has_loops else None
        self.bytes = codes.nbytes * (1 if self._panels is None else 2) + (outliers.bytes if outliers else 0)

    @property
    def panels(self) -> Panels | None:
        """Same as PreparedProduct.panels."""
        return None if self._outliers else self._panels

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply as a PreparedProduct, with the same bits by either library."""
        wide, loops = rows.float(), serving_library.loops()
        inliers = wide if self._outliers is None else wide.index_fill(1, self._outliers.columns, 0.0)
        if loops is not None and self._panels is not None and rows.shape[0] <= serving_library.INT8_ROWS:
            y, missing_bias = loops.multiply(inliers, self._panels), self._bias if self._outliers else None
        else:
            y, missing_bias = self._by_onednn(loops, inliers), self._bias
        if self._outliers is not None:
            y.add_(self._outliers(wide))
        return (y if missing_bias is None else y.add_(missing_bias)).to(rows.dtype)

    def _by_onednn(self, loops: Loops | None, rows: Tensor) -> Tensor:
        """Multiply rows (M, K) fp32 without the bias. Returns (M, N)."""
        if loops is None:
            codes, scales = row_codes(rows)
            codes = codes.add_(128.0).to(torch.uint8)
        else:
            codes, scales = loops.round_rows(rows)
        return integers.int8_product(codes, self._packed, self._scales, self._zeros).mul_(scales)


def int8_product(weight: Tensor) -> Int8Product:
    """Prepare a product with a plain matrix (N, K), rounded to 8 bits with a scale for each row."""
    codes, scales = row_codes(weight)
    return Int8Product(codes.to(torch.int8), scales[:, 0])


def _int8_product(matrices: Sequence[QuantizedMatrix], bias: Tensor | None) -> Int8Product:
    """Join matrices for which `_can_join_int8` holds."""
    columns = matrices[0].columns
    unquantized = [matrix.unquantized for matrix in matrices if matrix.unquantized is not None]
    codes = torch.cat([matrix.codes for matrix in matrices])
    scales = torch.cat([matrix.scales.float().view(-1) for matrix in matrices])
    outliers = None if columns is None or not unquantized else OutlierColumns(columns, torch.cat(unquantized))
    return Int8Product(codes, scales, bias, outliers)


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


def joined_product(matrices: Sequence[Matrix], biases: Sequence[Tensor | None]) -> JoinedProduct | None:
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
    # Another engine of this process has moved them already.
    if len(shared) == 1 and contiguous and places[1:] == ends[:-1]:
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    # A view of a larger tensor would keep all of it in memory.
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
    # Outliers, an order of inputs, or a part that begins within a group differ from matrix to matrix.
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
