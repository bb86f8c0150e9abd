"""x W^T + b with W as codes and scales (kernels/quantized/matrix.py).

Two kinds of product:

    weight-only   W is restored, and x stays what it is
    int8          x has a scale for each row and W one for each output; sums are of whole numbers, and exact:
                  y = (Qx Qw) sw sx + x_O W_O. Columns O of x are left out of Qx and multiplied in 16 bits or more

device_products decides what runs on a GPU. On a CPU int8 is oneDNN's. Weight-only products of few rows with up to 4
bits run in compiled loops, or without a C compiler with 4 bits in torch. More rows use a copy that is restored once.
Under adapters W is restored in the dtype of x for each product, and freed after it.

None has a gradient for W. That of x is G W, with W restored again.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.compat import integers
from meshwright.kernels.c import serving_library
from meshwright.kernels.c.serving_library import Loops, Panels
from meshwright.kernels.chooser import device_kind
from meshwright.kernels.linear import cpu_product
from meshwright.kernels.linear.linear import input_gradient, product_dtype, products
from meshwright.kernels.quantized import device_products
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.rounding import absmax, absmax_scale, highest, quantize, zero_point
from meshwright.spec.model.quantization_schemes import Scheme

INT8_INPUTS = 2**31 // 128**2
"""Inputs for which sums of 8-bit products cannot overflow 32 bits."""
CODE_ROWS, CODE_ROWS_BESIDE_FP32 = 8, 24
"""Rows up to which compiled loops multiply codes faster than a CPU multiplies a restored copy: 16 bits, fp32."""
INT4_ROWS, INT4_ROWS_BESIDE_FP32 = 8, 24
"""Rows up to which a CPU's 4-bit product is faster than one with a restored copy.

The first for copies in bf16, or in fp32 with AVX2 alone. The second for fp32 with AVX-512 that has no units for bf16
(benchmarks/quantized_rates.py).
"""
ROW_BITS, WEIGHT_BITS = 24, 20
AT_ONCE = 2 ** (53 - ROW_BITS - WEIGHT_BITS)
"""Columns whose sum is exact."""


def quantized_linears_reference(
    x: Tensor, matrices: Sequence[QuantizedMatrix], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Multiply x (..., in) by matrices (out, in) transposed and add biases (out,)."""
    rows, outputs = x.reshape(-1, x.shape[-1]), []
    for matrix, bias in zip(matrices, biases, strict=True):
        if matrix.scheme.activations == "int8":
            columns, column_weights = outliers(rows, matrix)
            codes, scales, zeros = activation_codes(rows, matrix.scheme, columns)
            centred = codes if zeros is None else codes - zeros
            # Exact: fp64 holds whole numbers to 2^53.
            summed = centred.double() @ matrix.centred(matrix.codes).double().t()
            y = summed.float() * matrix.scales.float().view(-1) * scales
            y = y if columns is None else y + rows[:, columns].float() @ column_weights.float().t()
            y = y if bias is None else y + bias.float()
            # Rounding has no gradient, so that of the restored weights is passed on.
            if torch.is_grad_enabled():
                through = F.linear(rows.float(), matrix.dequantized(), None if bias is None else bias.float())
                y = y.detach() + (through - through.detach())
        else:
            y = F.linear(rows.float(), matrix.dequantized(), None if bias is None else bias.float())
        outputs.append(y.to(x.dtype).view(*x.shape[:-1], -1))
    return tuple(outputs)


def row_codes(rows: Tensor, without: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round rows (M, K) to whole numbers within -127 .. 127 (M, K) fp32, with scales (M, 1); columns `without` to 0."""
    wide = rows.float()
    if without is not None:
        wide = wide.index_fill(1, without.long(), 0.0)
    scales = absmax_scale(wide.abs().amax(1, keepdim=True), 8)
    return quantize(wide, scales, 0.0, -highest(8), highest(8)), scales


def activation_codes(
    rows: Tensor, scheme: Scheme, without: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round rows (M, K) to whole numbers as a scheme does; columns `without` to zero, which is exact.

    Returns codes (M, K) fp32, scales and zeros, (M, 1) or, if all tokens share them, (1, 1). No zeros: codes are within
    -127 .. 127. With zeros they are within 0 .. 255.
    """
    if scheme.symmetric_by_token or not len(rows):
        return *row_codes(rows, without), None
    wide = rows.float() if without is None else rows.float().index_fill(1, without.long(), 0.0)
    rounded = (zero_point if scheme.activation_zeros else absmax)(wide, 8, scheme.activation_share)
    return rounded.codes.float(), rounded.scale, rounded.zero if scheme.activation_zeros else None


def outliers(rows: Tensor, matrix: QuantizedMatrix) -> tuple[Tensor | None, Tensor]:
    """Return the columns (O,) that are multiplied separately, None = none, and their weights (N, O)."""
    if matrix.scheme.outliers == "threshold":
        # How many there are is not known without values.
        if compat.is_fake(rows):
            return None, rows
        columns = (rows.abs() > matrix.scheme.threshold).any(0).nonzero().squeeze(1)
        if not len(columns):
            return None, rows
        return columns, matrix.centred(matrix.codes[:, columns]) * matrix.scales.float()
    if matrix.columns is None or matrix.unquantized is None:
        return None, rows
    return matrix.columns, matrix.unquantized


def quantized_linears(
    x: Tensor, matrices: Sequence[QuantizedMatrix], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Multiply as the reference does, in x's dtype. The gradient is that of the restored weights."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (x, *biases) if tensor is not None):
        return _products(x, matrices, biases)
    outputs: tuple[Tensor, ...] = _QuantizedLinears.apply(x, *matrices)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return tuple(y if bias is None else y + bias for y, bias in zip(outputs, biases, strict=True))


class _QuantizedLinears(torch.autograd.Function):
    """Products that save nothing: x's gradient is that of the restored weights, of rounded activations too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *matrices: QuantizedMatrix) -> tuple[Tensor, ...]:
        ctx.matrices = matrices
        return _products(x, matrices, [None] * len(matrices))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        weights = (matrix.restored(gradients[0].dtype) for matrix in ctx.matrices)
        return input_gradient(gradients, weights), *[None] * len(ctx.matrices)


def _products(x: Tensor, matrices: Sequence[QuantizedMatrix], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    rows = x.reshape(-1, x.shape[-1])
    converted: dict[Any, tuple[Tensor, Tensor]] = {}
    outputs = []
    for matrix, bias in zip(matrices, biases, strict=True):
        multiply = _int8_linear if matrix.scheme.activations == "int8" else _weight_only_linear
        if matrix.order is None:
            y = multiply(rows, matrix, bias, converted)
        else:
            # Reordered rows are other rows, so nothing that was converted before can serve.
            y = multiply(rows.index_select(1, matrix.order), matrix.in_order_of_codes, bias, {})
        outputs.append(y.to(x.dtype).view(*x.shape[:-1], matrix.size_out))
    return tuple(outputs)


def _int8_linear(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, converted: dict[Any, Any]) -> Tensor:
    """Multiply in int8. `converted`: converted rows of earlier matrices, by the columns that are left out."""
    assert matrix.size_in < INT8_INPUTS
    columns, column_weights = outliers(rows, matrix)
    scheme = matrix.scheme
    key: Any = "all" if columns is None else "threshold" if matrix.columns is None else _column_key(matrix)
    # Read from fields: a property would be one call more for each product of a decoded token.
    symmetric = matrix.zeros is None and scheme.activation_share == "row" and not scheme.activation_zeros
    if symmetric and device_products.takes_int8(rows, matrix):
        return device_products.int8(rows, matrix, columns, column_weights, bias, key, converted)
    key = key, scheme.activation_share, scheme.activation_zeros
    if key not in converted:
        codes, scales, zeros = activation_codes(rows, scheme, columns)
        # oneDNN takes unsigned rows: 128 is their zero point.
        if _uses_onednn(rows):
            codes = (codes.add_(128.0) if zeros is None else codes).to(torch.uint8)
        converted[key] = codes, scales, zeros
    codes, scales, zeros = converted[key]
    if zeros is None and matrix.zeros is None:
        y = _int8_product(codes, matrix).mul_(scales)
    else:
        y = _zero_point_product(codes, zeros, matrix).mul_(scales)
    if columns is not None:
        y = y.add_(_outlier_product(rows[:, columns], column_weights, matrix))
    return y if bias is None else y.add_(bias)


def _column_key(matrix: QuantizedMatrix) -> tuple[int, ...]:
    """Return the matrix's outlier columns, read from the device once."""
    if "listed" not in matrix.prepared:
        assert matrix.columns is not None
        matrix.prepared["listed"] = tuple(matrix.columns.tolist())
    columns: tuple[int, ...] = matrix.prepared["listed"]
    return columns


def _outlier_product(x: Tensor, weights: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Multiply x (M, O) by unquantized weights (N, O). Returns (M, N) fp32.

    With a threshold the columns depend on all rows anyway. With known columns a row's result depends on no other row.
    """
    if matrix.unquantized is None:
        return x.float() @ weights.float().t()
    if "unquantized" not in matrix.prepared:
        matrix.prepared["unquantized"] = weights_in_steps(weights)
    return exact_product(x, matrix.prepared["unquantized"])


def _uses_onednn(x: Tensor) -> bool:
    return device_kind(x) == "cpu" and integers.has_int8_product()


def _int8_product(codes: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Multiply codes of rows by those of the matrix, times its scales. Returns (M, N) fp32."""
    scales = matrix.scales.float().view(-1)
    # A dry run holds as much memory as oneDNN's packed copy takes.
    if compat.is_fake(codes) and _uses_onednn(codes):
        _ = matrix.codes.clone()
        return scales.new_empty(len(codes), matrix.size_out)
    if not _uses_onednn(codes):
        return (codes.double() @ matrix.codes.double().t()).float() * scales
    packed = matrix.prepared.get("onednn")
    if packed is None:
        zeros = torch.zeros(matrix.size_out, dtype=torch.int64)
        packed = integers.pack_int8(matrix.codes), scales.contiguous(), zeros
        if matrix.keeps_copies:
            matrix.prepared["onednn"] = packed
    return integers.int8_product(codes, *packed)


def _zero_point_product(codes: Tensor, zeros: Tensor | None, matrix: QuantizedMatrix) -> Tensor:
    """Multiply codes of rows less their zeros by those of the matrix, times its scales. Returns (M, N) fp32.

    The product of codes is exact, and so are the sums that zeros need (kernels/quantized/rounding.py, product).
    oneDNN returns its sums in fp32, which rounds those above 2^24.
    """
    scales, inputs = matrix.scales.float().view(-1), matrix.size_in
    if not _uses_onednn(codes) or compat.is_fake(codes):
        offset = 128.0 if _uses_onednn(codes) and zeros is None else 0.0 if zeros is None else zeros.double()
        return ((codes.double() - offset) @ matrix.centred(matrix.codes).double().t()).float() * scales
    parts = matrix.prepared.get("onednn zeros")
    if parts is None:
        # Codes with zeros count from 0. Less 128 they are signed, as oneDNN takes them, and so are their zeros.
        shift = 0 if matrix.zeros is None else 128
        signed = (matrix.codes.short() - shift).to(torch.int8)
        whole = torch.zeros(matrix.size_out, dtype=torch.int64)
        weight_zeros = (matrix.every_zero().double() - shift).view(1, -1)
        parts = integers.pack_int8(signed), torch.ones_like(scales), whole, signed.double().sum(1), weight_zeros
        if matrix.keeps_copies:
            matrix.prepared["onednn zeros"] = parts
    packed, ones, whole, sums_of_outputs, weight_zeros = parts
    row_zeros = 0.0 if zeros is None else zeros.double() - 128.0
    sums_of_rows = codes.double().sum(1, keepdim=True) - 128.0 * inputs
    sums = integers.int8_product(codes, packed, ones, whole).double() - row_zeros * sums_of_outputs
    return (sums - weight_zeros * sums_of_rows + inputs * row_zeros * weight_zeros).float() * scales


def _weight_only_linear(
    rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, converted: dict[Any, Any]
) -> Tensor:
    y = device_products.packed(rows, matrix, bias, converted)
    return _restored_linear(rows, matrix, bias) if y is None else y


def _restored_linear(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    if not matrix.keeps_copies:
        return products(rows, (matrix.restored(rows.dtype),), (bias,))[0]
    dtype = product_dtype(rows)
    if device_kind(rows) == "cpu" and len(rows) <= (CODE_ROWS_BESIDE_FP32 if dtype == torch.float32 else CODE_ROWS):
        y = _code_linear(rows, matrix, bias)
        if y is not None:
            return y
    if takes_int4(matrix, rows):
        beside_fp32 = compat.HAS_WIDE_VECTORS and not compat.cpu_multiplies(torch.bfloat16)
        if len(rows) <= (INT4_ROWS_BESIDE_FP32 if beside_fp32 else INT4_ROWS):
            return _int4_linear(rows, matrix, bias)
    packs = device_kind(rows) == "cpu" and _keeps_onednn_copy(matrix, dtype)
    if str(dtype) not in matrix.prepared:
        restored = matrix.restored(dtype)
        matrix.prepared[str(dtype)] = compat.pack_for_onednn(restored) if packs else restored
    product = compat.onednn_product if packs else cpu_product.linear
    operand = rows.to(dtype).contiguous() if packs else rows.to(dtype)
    return product(operand, matrix.prepared[str(dtype)], None if bias is None else bias.to(dtype))


def _keeps_onednn_copy(matrix: QuantizedMatrix, dtype: torch.dtype) -> bool:
    """Return whether the copy is stored in oneDNN's order, because oneDNN multiplies with it."""
    by_onednn = compat.blas_is_slow() if dtype == torch.float32 else compat.cpu_multiplies(dtype)
    return by_onednn and matrix.size_out * matrix.size_in >= cpu_product.LEAST and not compat.is_fake(matrix.codes)


def code_panels(loops: Loops, matrices: Sequence[QuantizedMatrix], bias: Tensor | None) -> Panels | None:
    """Return panels of matrices of one scheme of up to 4 bits, side by side. None where loops cannot take them."""
    first = matrices[0]
    if not loops.has_codes or first.scheme.bits > 4 or any(matrix.scheme != first.scheme for matrix in matrices):
        return None
    if any(matrix.before or matrix.columns is not None or matrix.order is not None for matrix in matrices):
        return None
    zeros = None if first.zeros is None else torch.cat([matrix.every_zero() for matrix in matrices])
    scales = torch.cat([matrix.every_scale() for matrix in matrices])
    codes = torch.cat([matrix.whole_codes() for matrix in matrices])
    table = first.numbers_of_codes(codes.device)
    return Panels.of_codes(codes, scales, zeros, table, first.scheme.group or first.size_in, bias)


def _code_linear(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor | None:
    """Multiply in compiled loops. Returns None where these cannot take the matrix."""
    loops = None if compat.is_fake(rows) or torch.compiler.is_compiling() else serving_library.compiled()
    if loops is None:
        return None
    if "panels" not in matrix.prepared:
        matrix.prepared["panels"] = code_panels(loops, [matrix], None)
    panels = matrix.prepared["panels"]
    if panels is None:
        return None
    with serving_library.used(loops):
        y = loops.multiply(rows.float().contiguous(), panels)
    return y if bias is None else y.add_(bias)


def takes_int4(matrix: QuantizedMatrix, rows: Tensor) -> bool:
    """Return whether torch's 4-bit product takes a matrix: integers in groups, on a CPU with AVX2 or bf16 products.

    Rows are rounded to bf16 for it: with rows in fp32 or fp16 it is ten times slower.
    """
    scheme = matrix.scheme
    if scheme.bits != 4 or scheme.codes != "integer" or scheme.group not in integers.INT4_GROUPS:
        return False
    if device_kind(rows) != "cpu" or not integers.has_int4_product():
        return False
    return matrix.size_out % 16 == 0 and matrix.size_in % scheme.group == 0


def _int4_linear(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    if "int4" not in matrix.prepared:
        packed = integers.pack_int4(matrix.whole_codes())
        matrix.prepared["int4"] = packed, matrix.scheme.group, matrix.scales_and_shifts()
    y = integers.int4_product(rows.to(torch.bfloat16).contiguous(), *matrix.prepared["int4"])
    return y if bias is None else y + bias


def quantized_expert_linear(
    rows: Tensor, stack: QuantizedMatrix, counts: Sequence[int], linears: Any = quantized_linears
) -> Tensor:
    """Multiply rows (N, in), sorted by expert, by a stack (X, out, in). Returns (N, out).

    counts: rows of each expert.
    """
    parts = torch.split(rows, list(counts))
    outputs = [linears(part, [stack.expert(number)], [None])[0] for number, part in enumerate(parts) if len(part)]
    return torch.cat(outputs) if outputs else rows.new_zeros(0, stack.size_out)


def in_steps(values: Tensor, bits: int) -> Tensor:
    """Round values (M, K) to multiples, in fp64, of 2^-bits of a power of two above each row's largest."""
    wide = values.double()
    exponents = torch.frexp(wide.abs().amax(1, keepdim=True)).exponent
    return torch.ldexp(torch.ldexp(wide, bits - exponents).round_(), exponents - bits)


def weights_in_steps(weights: Tensor) -> Tensor:
    """Prepare weights (N, K), where K may be 0, for `exact_product`: (K, N) fp64."""
    return in_steps(weights, WEIGHT_BITS).t().contiguous() if weights.shape[1] else weights.double().t()


def exact_product(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply x (M, K) by `weights_in_steps` (K, N). Returns (M, N) fp32, whose rows depend on no other row.

    A BLAS library's order of additions depends on the number of rows, and rounded sums depend on the order. Here no sum
    is rounded: both operands are first rounded to steps for which products and their sums are whole numbers of 53 bits.

        x   24 bits below a power of two above the row's largest: as exact as fp32 is for that one
        W   20 bits below the same of an output: fp16 has 11, bf16 8
        53 - 24 - 20 = 9 bits are left for the sum: 512 columns
    """
    if not len(weights):
        return x.new_zeros(len(x), weights.shape[1], dtype=torch.float32)
    rows = in_steps(x, ROW_BITS)
    total = rows[:, :AT_ONCE] @ weights[:AT_ONCE]
    for start in range(AT_ONCE, len(weights), AT_ONCE):
        total += rows[:, start : start + AT_ONCE] @ weights[start : start + AT_ONCE]
    return total.float()
