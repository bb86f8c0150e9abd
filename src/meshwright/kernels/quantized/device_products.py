"""Products with quantized matrices on a GPU. Which form runs depends on the number of rows.

    4 bits, one and two rows   codes become numbers in the threads that add them up (triton/few_rows.py)
    4 bits, up to FUSED_ROWS   codes become operands of tensor cores inside the product (triton/packed_product.py)
    4 bits, more rows          a slab of the matrix is restored, which the cache holds, and torch multiplies with it
    int8                       rows are rounded in one kernel and multiplied in another (triton/int8_product.py)
    fp8                        as int8, by torch's product; without units for it as 4 bits, up to E4M3_ROWS

The second and third form round a weight to the same number, the first does not round it. Each function returns None
where the plain product is to run: on a CPU, in compiled code and dry runs, and where the chooser takes no kernel.

A serving engine first times the forms of 4 bits against each other (product_contest.py). The row limits above hold
elsewhere.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compat import integers
from meshwright.kernels.chooser import uses_triton
from meshwright.kernels.linear import fp8
from meshwright.kernels.quantized.contest import ProductContest, ProductWay
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.target import simulated_kind
from meshwright.spec.extras import install

FUSED_ROWS, E4M3_ROWS = 512, 64
"""Most rows for which decoding the weights anew for each block of rows pays off.

It then costs less than writing and reading them, or, of 8 bits, than reading a copy that was restored once
(benchmarks/quantized_estimate.py).
"""
FEW_ROWS = 2
"""Most rows for which a kernel without tensor cores reads codes of 8 bits (triton/few_rows.py)."""
SLAB_BYTES = 32 * 2**20
"""Size of a restored slab, which must fit in the last-level cache: 40 MiB on an A100, 50 on an H100."""
SLAB_ROWS = 128
"""Rows of the matrix of which slabs are multiples."""
GROUPS = (0, 32, 64, 128, 256)
"""Inputs that may share a scale in the fused product. 0 = all."""


def packed(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, converted: dict[Any, Any]) -> Tensor | None:
    """Multiply rows (M, K) by weight-only codes. Returns (M, N), or None where the plain product must run.

    Args:
        converted: Converted rows, shared with other products of the same rows.
    """
    if not len(rows) or matrix.codes.dim() != 2 or matrix.before:
        return None
    if matrix.scheme.activations == "fp8" and _has_fp8_product(rows, matrix):
        return _fp8_product(rows, matrix, bias, converted)
    if _contests and matrix.scheme.bits == 4 and ("ways" in matrix.prepared or _is_contested(rows, matrix)):
        product = _contests[-1].product(rows, matrix, bias)
        if product is not None:
            return product
    few = E4M3_ROWS if matrix.scheme.codes == "e4m3" else FUSED_ROWS
    if len(rows) <= few and uses_triton("packed_product", rows, prefer=matrix.prefer, feature=fusion_obstacle(matrix)):
        from meshwright.kernels.triton import packed_product  # not `_fused`: each call costs few rows a microsecond

        return packed_product.packed_linear(rows, matrix.packed(), bias)
    if matrix.scheme.bits == 4 and matrix.unquantized is None and uses_triton("restore", rows, prefer=matrix.prefer):
        return _by_slabs(rows, matrix, bias)
    return None


_contests: list[ProductContest] = []
"""The open contest, if there is one."""


def open_contest(copies: bool, say: Callable[[str], None]) -> ProductContest:
    """Time products with 4-bit codes from now on, each form at its first call.

    Args:
        copies: Include ways that need a second layout in memory.
        say: Called with a line for each form.
    """
    _contests[:] = [new_contest(copies, say)]
    return _contests[0]


def new_contest(copies: bool, say: Callable[[str], None]) -> ProductContest:
    """Return a contest of all ways. Products do not use it unless it is opened."""
    return ProductContest(WAYS, lambda rows: WAYS[rows > FUSED_ROWS].name, copies=copies, say=say)


def close_contest(contest: ProductContest) -> None:
    """Free the contest's second layouts, and return to the default ways unless another contest is open."""
    contest.close()
    if _contests and _contests[0] is contest:
        _contests.clear()


def _is_contested(rows: Tensor, matrix: QuantizedMatrix) -> bool:
    """Return whether a contest decides: not in compiled code or dry runs, and only where `auto` may choose."""
    plain = matrix.unquantized is None and matrix.outer is None and matrix.keeps_copies
    return plain and matrix.prefer == "auto" and uses_triton("packed_product", rows, feature=fusion_obstacle(matrix))


def _fused(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, _: Any = None) -> Tensor:
    from meshwright.kernels.triton import packed_product

    return packed_product.packed_linear(rows, matrix.packed(), bias)


def _torch_obstacle(matrix: QuantizedMatrix, dtype: torch.dtype) -> str:
    if matrix.scheme.codes != "integer" or dtype != torch.bfloat16:
        return "it takes whole numbers and bf16"
    if matrix.scheme.group not in integers.INT4_GROUPS_OF_GPU:
        return f"it takes no groups of {matrix.scheme.group or matrix.size_in}"
    return integers.gpu_int4_missing(matrix.size_in, matrix.size_out)


def _torch_layout(matrix: QuantizedMatrix, _: torch.dtype) -> tuple[Any, int]:
    scales_and_shifts = matrix.scales_and_shifts()
    packed = integers.pack_gpu_int4(matrix.codes)
    return (packed, scales_and_shifts), packed.nbytes + scales_and_shifts.nbytes


def _by_torch(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, layout: Any) -> Tensor:
    y = integers.gpu_int4_product(rows.contiguous(), layout[0], matrix.scheme.group, layout[1])
    return y if bias is None else y.add_(bias)


def _gemlite_obstacle(matrix: QuantizedMatrix, _: torch.dtype) -> str:
    if not integers.gemlite_version():
        return f"not installed: {install('gemlite')}"
    if matrix.scheme.codes != "integer" or not matrix.scheme.group:
        return "it takes whole numbers in groups"
    return "" if matrix.size_in % max(32, matrix.scheme.group) == 0 else "it takes whole groups"


def _gemlite_layout(matrix: QuantizedMatrix, dtype: torch.dtype) -> tuple[Any, int]:
    zeros: Tensor | int = 8 if matrix.zeros is None else matrix.every_zero()
    return integers.gemlite_product(matrix.whole_codes(), matrix.scales, zeros, matrix.scheme.group, dtype)


def _by_gemlite(rows: Tensor, _: QuantizedMatrix, bias: Tensor | None, layout: Any) -> Tensor:
    y: Tensor = layout(rows.contiguous())
    return y if bias is None else y.add_(bias)


def _copy_layout(matrix: QuantizedMatrix, dtype: torch.dtype) -> tuple[Any, int]:
    weight = matrix.restored(dtype)
    return weight, weight.nbytes


def _by_copy(rows: Tensor, _: QuantizedMatrix, bias: Tensor | None, layout: Any) -> Tensor:
    return F.linear(rows, layout, None if bias is None else bias.to(rows.dtype))


def fusion_obstacle(matrix: QuantizedMatrix) -> str:
    """Return why the fused product cannot take a matrix. Empty = it can."""
    scheme = matrix.scheme
    if scheme.bits != 4 and scheme.codes != "e4m3":
        return f"codes of {scheme.bits} bits are restored"
    if scheme.group not in GROUPS:
        return f"the kernel takes no groups of {scheme.group}"
    return "" if matrix.unquantized is None else "some columns are not quantized"


def _by_slabs(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    from meshwright.kernels.triton import code_words

    whole = matrix.packed()
    out = torch.empty(len(rows), matrix.size_out, dtype=rows.dtype, device=rows.device)
    step = slab_rows(matrix.size_out, matrix.size_in, rows.dtype.itemsize)
    scratch = torch.empty(step, matrix.size_in, dtype=rows.dtype, device=rows.device)
    for start in range(0, matrix.size_out, step):
        outputs = slice(start, start + step)
        slab = whole._replace(
            codes=whole.codes[outputs],
            scales=whole.scales[outputs],
            zeros=None if whole.zeros is None else whole.zeros[outputs],
        )
        weight = code_words.restore(slab, scratch[: len(slab.codes)])
        if bias is None:
            torch.mm(rows, weight.t(), out=out[:, outputs])
        else:
            torch.addmm(bias[outputs].to(rows.dtype), rows, weight.t(), out=out[:, outputs])
    return out


def slab_rows(outputs: int, inputs: int, itemsize: int) -> int:
    """Return the outputs of a slab. All slabs of a matrix have nearly one size, and restored fit in SLAB_BYTES."""
    count = -(-outputs * inputs * itemsize // SLAB_BYTES)
    return outputs if count <= 1 else -(-outputs // (count * SLAB_ROWS)) * SLAB_ROWS


def takes_int8(rows: Tensor, matrix: QuantizedMatrix) -> bool:
    """Return whether the kernels for 8-bit integers run here."""
    return len(rows) > 0 and uses_triton("int8_product", rows, prefer=matrix.prefer)


def int8(
    rows: Tensor, matrix: QuantizedMatrix, columns: Tensor | None, unquantized: Tensor, bias: Tensor | None, key: Any,
    converted: dict[Any, Any],
) -> Tensor:  # fmt: skip
    """Multiply rows (M, K) by 8-bit codes. Returns (M, N).

    Args:
        columns: Columns (O,) of rows that are multiplied with `unquantized` (N, O). None = none.
        key: Name of these columns in `converted`.
    """
    from meshwright.kernels.triton import int8_product
    from meshwright.kernels.triton import row_rounding as narrowing

    if ("int8", key) not in converted:
        converted["int8", key] = narrowing.rounded(rows, torch.int8, _left_out_marks(matrix, columns))
    parts = (None, None) if columns is None else (columns.int(), unquantized.contiguous())
    operand = int8_product.Int8Matrix(matrix.codes.contiguous(), matrix.scales, *parts)
    return int8_product.int8_linear(rows, converted["int8", key], operand, bias)


def _left_out_marks(matrix: QuantizedMatrix, columns: Tensor | None) -> Tensor | None:
    """Return (K,) uint8 marks: 1 where a column is multiplied separately. Made once for fixed columns."""
    if columns is None:
        return None
    if matrix.columns is not None and "left out" in matrix.prepared:
        known_marks: Tensor = matrix.prepared["left out"]
        return known_marks
    marks = torch.zeros(matrix.size_in, dtype=torch.uint8, device=columns.device)
    marks[columns.long()] = 1
    if matrix.columns is not None:
        matrix.prepared["left out"] = marks
    return marks


def _has_fp8_product(rows: Tensor, matrix: QuantizedMatrix) -> bool:
    """Return whether torch multiplies fp8 operands of these sizes here, with a scale for each row.

    Its only result dtype is bf16.
    """
    if rows.device.type != "cuda" or simulated_kind() or torch.compiler.is_compiling() or rows.dtype != torch.bfloat16:
        return False
    fits = matrix.size_in % fp8.MULTIPLE == 0 and matrix.size_out % fp8.MULTIPLE == 0
    return fits and not fp8.missing(rows.device)


def _fp8_product(rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, converted: dict[Any, Any]) -> Tensor:
    """Round one or two rows as more are rounded, but multiply them as numbers: torch would pad to full tiles."""
    if len(rows) <= FEW_ROWS and uses_triton("packed_product", rows, prefer=matrix.prefer):
        from meshwright.kernels.triton import few_rows
        from meshwright.kernels.triton import row_rounding as narrowing

        if "fp8 numbers" not in converted:
            converted["fp8 numbers"] = narrowing.rounded(rows, rows.dtype)
        numbers = converted["fp8 numbers"]
        return few_rows.packed_linear(numbers.codes, matrix.packed(), bias, numbers.scales)
    if "fp8" not in converted:
        converted["fp8"] = fp8.narrow(rows, matrix.prefer)
    weight = fp8.Narrow(matrix.codes, matrix.scales.float())
    return fp8.product(converted["fp8"], weight, rows.dtype, None if bias is None else bias.to(rows.dtype))


WAYS = (
    ProductWay("codes inside", lambda *_: "", _fused),
    ProductWay("restored slabs", lambda *_: "", lambda rows, matrix, bias, _: _by_slabs(rows, matrix, bias)),
    ProductWay("torch's 4-bit product", _torch_obstacle, _by_torch, _torch_layout),
    ProductWay("gemlite", _gemlite_obstacle, _by_gemlite, _gemlite_layout),
    ProductWay("a copy in 16 bits", lambda *_: "", _by_copy, _copy_layout),
)
"""Ways to multiply with 4-bit codes. The default rule uses the first two."""
