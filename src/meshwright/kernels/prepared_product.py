"""Products of few rows with matrices that do not change: copies of them in the order in which a CPU reads them.

Several matrices that read the same input are one product. Which copy is made:

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
from meshwright.kernels import cpu_product
from meshwright.kernels.compiled import library
from meshwright.kernels.compiled.library import ROWS, ROWS_BESIDE_BF16, Loops
from meshwright.kernels.compiled.panels import Panels
from meshwright.kernels.exact_sums import exact_product, weights_in_steps
from meshwright.kernels.linear import needs_wide, products
from meshwright.kernels.quantized_linear import INT8_INPUTS, code_panels, quantized_linears_reference, row_codes
from meshwright.kernels.quantized_matrix import QuantizedMatrix

Matrix = Tensor | QuantizedMatrix
"""(N, K), or codes and scales that stand for it."""


class PreparedProduct(Protocol):
    """x times the transposed matrices, side by side, plus their biases."""

    bytes: int
    """Of copies of the matrices."""

    @property
    def panels(self) -> Panels | None:
        """What compiled loops read, where that is the whole product; None = there are none."""

    def __call__(self, rows: Tensor) -> Tensor:
        """rows (M, K) -> (M, N of all)."""


def prepared_product(matrices: Sequence[Matrix], biases: Sequence[Tensor | None]) -> PreparedProduct | None:
    """Of matrices (N, K) on a CPU. None where there is nothing better than the plain product."""
    first = matrices[0]
    if _device(first).type != "cpu":
        return None
    coded = [one for one in matrices if isinstance(one, QuantizedMatrix)]
    plain = [one for one in matrices if isinstance(one, Tensor)]
    if plain and coded:
        return None
    bias = _joined(biases, [_rows(one) for one in matrices])
    if plain:
        return _of_numbers(plain, biases, bias)
    if any(one.order is not None for one in coded):
        return _of_ordered(coded, biases)
    if all(one.scheme.activations == "int8" for one in coded):
        return _of_int8(coded, bias) if _share_columns(coded) else None
    if any(one.scheme.activations == "int8" or not one.keeps_copies for one in coded):
        return None
    if (loops := library.compiled()) is not None and (panels := code_panels(loops, coded, bias)) is not None:
        return CodeProduct(loops, panels)
    return _of_numbers([one.dequantized() for one in coded], biases, bias, own=True)


def _of_ordered(matrices: Sequence[QuantizedMatrix], biases: Sequence[Tensor | None]) -> PreparedProduct | None:
    """Of matrices whose codes stand in an order of inputs; those that read one input were rounded in the same."""
    order = matrices[0].order
    if order is None or not all(matrix.order is not None and torch.equal(matrix.order, order) for matrix in matrices):
        return None
    product = prepared_product([matrix.in_order_of_codes for matrix in matrices], biases)
    return None if product is None else OrderedProduct(product, order)


def reference(matrices: Sequence[Matrix], biases: Sequence[Tensor | None], rows: Tensor) -> Tensor:
    """What a prepared product gives, by plain ones: rows (M, K) -> (M, N of all)."""
    found = []
    for matrix, bias in zip(matrices, biases, strict=True):
        if isinstance(matrix, Tensor):
            wide = F.linear(rows.float(), matrix.float(), None if bias is None else bias.float())
            found.append(wide.to(rows.dtype))
        else:
            found += quantized_linears_reference(rows, [matrix], [bias])
    return torch.cat(found, dim=-1)


def int8_of(weight: Tensor) -> "Int8Product":
    """A product with a plain matrix (N, K), whose rows are rounded to 8 bits with a scale each."""
    codes, scales = row_codes(weight)
    return Int8Product(codes.to(torch.int8), scales[:, 0])


def _device(matrix: Matrix) -> torch.device:
    return matrix.device if isinstance(matrix, Tensor) else matrix.codes.device


def _rows(matrix: Matrix) -> int:
    return len(matrix) if isinstance(matrix, Tensor) else matrix.size_out


def _joined(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """(N of all,) fp32, zero where there is none; None = there is none at all."""
    if all(one is None for one in biases):
        return None
    like = next(one for one in biases if one is not None).detach().float()
    each = [
        like.new_zeros(size) if one is None else one.detach().float() for one, size in zip(biases, sizes, strict=True)
    ]
    return torch.cat(each)


def _of_numbers(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], bias: Tensor | None, own: bool = False
) -> PreparedProduct | None:
    """`bias`: of all; `own`: whether the weights are copies, which nobody else has."""
    given = [one.detach() for one in weights]
    wide = given[0].dtype == torch.float32 or needs_wide(given[0])
    if library.compiled() is not None:
        narrow = given[0].dtype == torch.bfloat16 and not given[0].shape[1] % 2
        if narrow or wide:
            whole = torch.cat([one if narrow else one.float() for one in given])
            if (panels := Panels.of_numbers(whole, bias)) is not None:
                return PanelProduct(panels, given, biases, most=ROWS if wide else ROWS_BESIDE_BF16, own=own)
    if not wide:
        return None
    whole = torch.cat([one.float() for one in given])
    return OnednnProduct(whole, bias) if compat.blas_is_slow() else TransposedProduct(whole, bias)


@final
class PanelProduct:
    """By compiled loops for few rows, and for more as any other product."""

    def __init__(
        self, panels: Panels, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, most: int = ROWS,
        own: bool = False,
    ) -> None:  # fmt: skip
        """`weights` (some of N, K), `panels` of all of them; `most`: rows that are few; `own`: as _of_numbers."""
        self.panels, self._weights, self._biases, self._most = panels, weights, biases, most
        self.bytes = panels.bytes + own * sum(one.nbytes for one in weights)

    def __call__(self, rows: Tensor) -> Tensor:
        """As PreparedProduct."""
        loops = library.loops()
        if loops is not None and loops.few(rows.shape[0], self._most) and rows.device.type == "cpu":
            return loops.multiply(rows.float().contiguous(), self.panels).to(rows.dtype)
        found = products(rows, self._weights, self._biases)
        return found[0] if len(found) == 1 else torch.cat(found, -1)


LOOKED_UP_ROWS = 1024
"""Rows up to which looking codes up costs less than restoring the matrix for a product."""


@final
class CodeProduct:
    """By compiled loops, and by torch with restored numbers for very many rows."""

    def __init__(self, loops: Loops, panels: Panels) -> None:
        """`loops` restore."""
        self._loops, self.panels = loops, panels
        self.bytes = panels.bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """As PreparedProduct."""
        own = library.loops()
        if own is not None and own.few(rows.shape[0], LOOKED_UP_ROWS):
            return own.multiply(rows.float().contiguous(), self.panels).to(rows.dtype)
        return cpu_product.linear(rows.float(), self._loops.restored(self.panels), self.panels.bias).to(rows.dtype)


@final
class OrderedProduct:
    """Of inputs that are put in an order first."""

    panels = None

    def __init__(self, product: PreparedProduct, order: Tensor) -> None:
        """`order` (K,) int32."""
        self._product, self._order = product, order
        self.bytes = product.bytes

    def __call__(self, rows: Tensor) -> Tensor:
        """As PreparedProduct."""
        return self._product(rows.index_select(1, self._order))


@final
class TransposedProduct:
    """With a matrix as (K, N)."""

    panels = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` (N, K) fp32, `bias` (N,)."""
        self._turned, self._bias = weight.t().contiguous(), bias
        self.bytes = weight.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        """As PreparedProduct."""
        wide = rows.float()
        found = torch.mm(wide, self._turned) if self._bias is None else torch.addmm(self._bias, wide, self._turned)
        return found.to(rows.dtype)


@final
class OnednnProduct:
    """With a matrix in oneDNN's own order."""

    panels = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` (N, K) fp32, `bias` (N,)."""
        self._packed, self._bias = compat.onednn_packed(weight.contiguous()), bias
        self.bytes = weight.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        """As PreparedProduct."""
        return compat.onednn_product(rows.float().contiguous(), self._packed, self._bias).to(rows.dtype)


def _share_columns(matrices: Sequence[QuantizedMatrix]) -> bool:
    """Whether matrices leave out the same columns, known before, of their rows."""
    first = matrices[0].columns
    if any(one.scheme.outliers == "threshold" or one.size_in >= INT8_INPUTS for one in matrices):
        return False
    if not integers.has_int8_product():
        return False
    if first is None or matrices[0].kept is None:
        return all(one.columns is None or one.kept is None for one in matrices)
    return all(one.columns is not None and torch.equal(one.columns, first) for one in matrices)


@final
class Int8Product:
    """Of 8-bit rows with 8-bit matrices, by oneDNN; columns that are left out are multiplied apart, and exactly."""

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None, apart: "ColumnsApart | None" = None):
        """Codes (N, K) int8, scales (N,) fp32, bias (N,), of matrices side by side."""
        self._packed, self._scales = integers.packed_int8(codes), scales.contiguous()
        self._zeros = torch.zeros(len(codes), dtype=torch.int64)
        self._apart, self._bias = apart, bias
        own = library.compiled()
        takes = own is not None and own.has_int8
        self._few = Panels.of_int8(codes, self._scales, None if apart else bias) if takes else None
        self.bytes = codes.nbytes * (1 if self._few is None else 2) + (apart.bytes if apart else 0)

    @property
    def panels(self) -> Panels | None:
        """As PreparedProduct."""
        return None if self._apart else self._few

    def __call__(self, rows: Tensor) -> Tensor:
        """As PreparedProduct; the same bits by either library."""
        wide, own = rows.float(), library.loops()
        left = wide if self._apart is None else wide.index_fill(1, self._apart.columns, 0.0)
        if own is not None and self._few is not None and rows.shape[0] <= library.INT8_ROWS:
            found, missing = own.multiply(left, self._few), self._bias if self._apart else None
        else:
            found, missing = self._by_onednn(own, left), self._bias
        if self._apart is not None:
            found.add_(self._apart(wide))
        return (found if missing is None else found.add_(missing)).to(rows.dtype)

    def _by_onednn(self, own: Loops | None, rows: Tensor) -> Tensor:
        """rows (M, K) fp32 -> (M, N), without the bias."""
        if own is None:
            codes, scales = row_codes(rows)
            codes = codes.add_(128.0).to(torch.uint8)
        else:
            codes, scales = own.round_rows(rows)
        return integers.int8_product(codes, self._packed, self._scales, self._zeros).mul_(scales)


@final
class ColumnsApart:
    """Inputs whose weights are not codes."""

    def __init__(self, columns: Tensor, kept: Tensor) -> None:
        """columns (O,), kept (N, O)."""
        self.columns, self._kept = columns.long(), weights_in_steps(kept)
        self.bytes = self._kept.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        """rows (M, K) fp32 -> (M, N)."""
        return exact_product(rows.index_select(1, self.columns), self._kept)


def _of_int8(matrices: Sequence[QuantizedMatrix], bias: Tensor | None) -> Int8Product:
    """Of matrices as `_share_columns`."""
    columns = matrices[0].columns
    kept = [one.kept for one in matrices if one.kept is not None]
    codes = torch.cat([one.codes for one in matrices])
    scales = torch.cat([one.scales.float().view(-1) for one in matrices])
    apart = None if columns is None or not kept else ColumnsApart(columns, torch.cat(kept))
    return Int8Product(codes, scales, bias, apart)
