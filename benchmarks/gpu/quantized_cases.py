"""Products with matrices of codes, from one row of a decoder to a long prompt. Plain code restores the matrix or rounds
x first; the product in 16 bit is a rival."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.case import EIGHT_BITS, ROWS, Case, Count, Leaf, Run, implementations, taken
from meshwright.kernels.linear import fp8
from meshwright.kernels.quantized import device_products
from meshwright.kernels.quantized.device_products import ProductWay
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.kernels.quantized.quantized_linear import quantized_linears, quantized_linears_reference
from meshwright.spec.model.quantization_schemes import SCHEMES

BF16 = torch.bfloat16
OUTLIERS = 0.01
"""Share of columns that llm-int8 keeps."""


def int4_linear(rows: int, out: int, into: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """Round-to-nearest, groups of 32."""
    return _packed("int4-rtn", rows, out, into, dtype, device)


def nf4_linear(rows: int, out: int, into: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """Normal floats, groups of 64."""
    return _packed("nf4", rows, out, into, dtype, device)


def _packed(name: str, rows: int, out: int, into: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Ours by torch multiplies with a copy that was restored once, as products do without the kernel."""
    matrix = _matrix(name, out, into, device)
    by = {prefer: replace(matrix, prefer=prefer, prepared={}) for prefer in ("eager", "triton")}
    copies: dict[torch.dtype, Tensor] = {}

    def copy(x: Tensor) -> Tensor:
        if x.dtype not in copies:
            copies[x.dtype] = by["eager"].restored(x.dtype)
        return copies[x.dtype]

    def run(x: Tensor, prefer: str) -> Tensor:
        output = device_products.packed(x, by[prefer], None, {})
        return F.linear(x, copy(x)) if output is None else output

    def eager(x: Tensor) -> Tensor:
        return F.linear(x, by["eager"].restored(x.dtype))

    return Case(
        operation=f"{name} product", exact=_exact(matrix), eager=eager,
        ours=implementations("packed_product", run, device, dtype), chosen=taken("packed_product", device, dtype),
        rivals={"16 bit": _wide(matrix), **_layouts(matrix, dtype)}, kinds=(ROWS,), **_common(matrix, rows, dtype),
    )  # fmt: skip


def int8_linear(rows: int, out: int, into: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """LLM.int8() with one column in a hundred in 16 bit."""
    columns = torch.arange(0, into, round(1 / OUTLIERS), dtype=torch.int32, device=device)
    matrix = _matrix("llm-int8", out, into, device, columns)

    def run(x: Tensor, prefer: str) -> Tensor:
        return quantized_linears(x, [by[prefer]], [None])[0]

    def twin(x: Tensor) -> Tensor:
        return quantized_linears_reference(x, [matrix], [None])[0]

    by = {prefer: replace(matrix, prefer=prefer, prepared={}) for prefer in ("eager", "triton")}
    return Case(
        operation="LLM.int8() product", exact=_exact(matrix), eager=twin,
        ours=implementations("int8_product", run, device, dtype), chosen=taken("int8_product", device, dtype),
        rivals={"16 bit": _wide(matrix)}, kinds=(EIGHT_BITS,), **_common(matrix, rows, dtype),
    )  # fmt: skip


def fp8_linear(rows: int, out: int, into: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """x rounded by rows; without units for it, in 16 bit."""
    matrix = _matrix("fp8", out, into, device)

    def ours(x: Tensor) -> Tensor:
        return quantized_linears(x, [matrix], [None])[0]

    def twin(x: Tensor) -> Tensor:
        return F.linear(fp8.narrow(x).wide(), matrix.dequantized()).to(x.dtype)

    return Case(
        operation="fp8 product", exact=_exact(matrix), eager=twin, ours={"ours, torch": ours}, chosen="ours, torch",
        rivals={"16 bit": _wide(matrix)}, kinds=(EIGHT_BITS,), **_common(matrix, rows, BF16),
    )  # fmt: skip


def _matrix(
    name: str, out: int, into: int, device: torch.device, columns: Tensor | None = None
) -> QuantizedMatrix:  # fmt: skip
    generator = torch.Generator(device).manual_seed(out)
    weight = torch.randn(out, into, generator=generator, device=device) * into**-0.5
    return quantize_matrix("some", weight, SCHEMES[name], columns)


def _exact(matrix: QuantizedMatrix) -> Run:
    def exact(x: Tensor) -> Tensor:
        return x @ replace(matrix, prefer="eager", prepared={}).dequantized().to(x.dtype).t()

    return exact


def _wide(matrix: QuantizedMatrix) -> Run:
    copies: dict[torch.dtype, Tensor] = {}

    def wide(x: Tensor) -> Tensor:
        if x.dtype not in copies:
            copies[x.dtype] = replace(matrix, prefer="eager", prepared={}).restored(x.dtype)
        return F.linear(x, copies[x.dtype])

    return wide


def _layouts(matrix: QuantizedMatrix, dtype: torch.dtype) -> dict[str, Run]:
    """Others' products, of those that take the matrix here, with codes in an order of their own."""

    def multiply(way: ProductWay, x: Tensor) -> Tensor:
        if way.name not in made and way.layout is not None:
            made[way.name] = way.layout(matrix, dtype)[0]
        return way.multiply(x, matrix, None, made[way.name])

    made: dict[str, Any] = {}
    others = [way for way in device_products.WAYS[:-1] if way.layout is not None and not way.missing(matrix, dtype)]
    return {way.name: partial(multiply, way) for way in others if matrix.codes.is_cuda}


def _common(matrix: QuantizedMatrix, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Size, leaves, and the least that is moved: each tensor of the matrix once, x and the result."""
    out, into = matrix.size_out, matrix.size_in
    held = sum(tensor.numel() * tensor.element_size() for tensor in matrix.tensors.values())
    return {
        "size": f"{rows:,} x {out:,} x {into:,}", "dtype": dtype, "leaves": (Leaf((rows, into), dtype=dtype),),
        "counts": {"forward": Count(held + dtype.itemsize * rows * (out + into), 2.0 * rows * out * into)},
        "learns": False, "compiles": False,
    }  # fmt: skip
