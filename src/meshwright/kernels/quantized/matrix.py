"""A matrix, or a stack of them, as codes and scales: one representation for every device, file and method.

    codes    (..., N, K) int8, with zeros uint8, or e4m3
             fewer bits: bytes (..., N, ceil(K bits / 8)), the first code in the lowest bits
    scales   (..., N, groups); doubled ones are codes, with outer (..., ceil(N groups / 256)) and offset (..., 1)
    zeros    Z, whole ones as bytes (..., N, ceil(groups bits / 8)), real ones (..., N, groups); None = a fixed one
    columns  (O,) int32: inputs whose weights stay unquantized (..., N, O); their codes are those of zero
    order    (..., K) int32: the input that each column of codes is for; None = in order

The first product converts it to what the device multiplies with (kernels/quantized/quantized_linear.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.chooser import uses_triton
from meshwright.kernels.quantized.rounding import (
    doubled,
    dynamic_table,
    grouped,
    highest,
    pack,
    table_codes,
    undoubled,
    unpack,
)
from meshwright.spec.model.quantization_schemes import PIECE, TABLES, Codes, Scheme
from meshwright.spec.weights.boxes import CodesCut, ScalePlaces

PARTS = {name: name for name in ("codes", "scales", "outer", "offset", "zeros", "columns")} | {
    "kept": "unquantized", "order": "order",
}  # fmt: skip
"""Name of each tensor of a matrix in files, and the attribute of QuantizedMatrix that holds it."""


@dataclass(slots=True, kw_only=True, eq=False)
class QuantizedMatrix:
    """W (N, K), or (X, N, K)."""

    scheme: Scheme
    size_in: int
    """K."""
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    columns: Tensor | None = None
    unquantized: Tensor | None = None
    outer: Tensor | None = None
    offset: Tensor | None = None
    order: Tensor | None = None
    before: int = 0
    """Codes at the start of each row that stand for other inputs, in a part that begins within a group."""
    places: ScalePlaces | None = None
    """Position of a part's scales in those of the larger matrix."""
    keeps_copies: bool = True
    """Allows products to keep a restored copy. Under adapters none outlives its product."""
    prefer: str = "auto"
    """One of kernels.chooser.PREFERENCES."""
    prepared: dict[str, Any] = field(default_factory=dict)
    """Conversions of the matrix that products made for this device."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    """Small tables on the device of the tensors. Experts share those of their stack."""

    @property
    def size_out(self) -> int:
        """N."""
        return self.scales.shape[-2]

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Copy without conversions, which are made anew: oneDNN's tensors and addresses cannot be copied."""
        fresh: dict[str, Any] = {"prepared": {}, "tables": {}}
        return None, {part.name: getattr(self, part.name) for part in fields(self)} | fresh

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors that are present, by their name in files."""
        parts = {name: getattr(self, attribute) for name, attribute in PARTS.items()}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    @property
    def in_order_of_codes(self) -> "QuantizedMatrix":
        """Same matrix for inputs that stand in `order`."""
        if "in order of codes" not in self.prepared:
            self.prepared["in order of codes"] = replace(self, order=None, prepared={})
        matrix: QuantizedMatrix = self.prepared["in order of codes"]
        return matrix

    def every_zero(self) -> Tensor:
        """Return Z (..., N, groups), or one number, fp32."""
        if self.zeros is None:
            return torch.tensor(float(fixed_zero(self.scheme)), device=self.scales.device)
        whole = self.scheme.zeros == "whole"
        return (unpack(self.zeros, self.scheme.bits, self.scales.shape[-1]) if whole else self.zeros).float()

    def whole_codes(self) -> Tensor:
        """Return codes (..., N, K), one an element."""
        codes = unpack(self.codes, self.scheme.bits, self.width) if self.scheme.packed else self.codes
        return codes[..., self.before :]

    def centred(self, codes: Tensor) -> Tensor:
        """Return 8-bit codes (N, ...) of this matrix less their zeros, fp32: whole numbers within -255 .. 255."""
        return codes.float() if self.zeros is None else codes.float() - self.every_zero()

    @property
    def width(self) -> int:
        """Codes of a row."""
        return self.before + self.size_in

    def every_scale(self) -> Tensor:
        """Return S (..., N, groups) fp32."""
        if self.outer is None or self.offset is None:
            return self.scales.float()
        return undoubled(self.scales, self.outer, self.offset, self._once("table", dynamic_table), self.places)

    def scales_and_shifts(self) -> Tensor:
        """Return s and z of (q - 8) s + z, (groups, N, 2) bf16, as torch's 4-bit products read them."""
        scales = self.scales.float()
        shifts = (8.0 - self.every_zero()) * scales
        return torch.stack((scales, shifts), dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()

    def dequantized(self) -> Tensor:
        """Return (..., N, K) fp32."""
        return self.restored(torch.float32)

    def restored(self, dtype: torch.dtype) -> Tensor:
        """Return (..., N, K), computed in fp32 some rows at a time and rounded once."""
        if self.order is not None:
            return self._by_inputs(self.in_order_of_codes.restored(dtype), self.order)
        *stack, rows, _ = self.scales.shape
        weight = torch.empty(*stack, rows, self.size_in, dtype=dtype, device=self.codes.device)
        if not self._in_one_kernel(weight):
            for run, numbers in self.restored_rows():
                weight[..., run, :] = numbers
                del numbers
            return weight
        from meshwright.kernels.triton import code_words

        weight = weight.new_empty(rows, self.width) if self.before else weight
        code_words.restore(self.packed(), weight)
        return weight[..., self.before :].contiguous() if self.before else weight

    def packed(self) -> Any:
        """Return codes, scales and zeros as Triton's kernels read them (kernels/triton/code_words.py).

        Made once, except from scales that are codes themselves where no copy may stay.
        """
        if "packed" in self.prepared:
            return self.prepared["packed"]
        from meshwright.kernels.triton.code_words import PackedMatrix

        table = self._once("table of codes", self.numbers_of_codes) if self.scheme.codes in TABLES else None
        scales = self.scales if self.outer is None else self.every_scale()
        packed = PackedMatrix(
            self.codes.contiguous(), scales.contiguous(), self.zeros, table, self.size_in, self.scheme.group
        )
        if self.outer is None or self.keeps_copies:
            self.prepared["packed"] = packed
        return packed

    def restored_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield runs of rows with their numbers (..., R, K) fp32, PIECE elements at a time."""
        *stack, rows, _ = self.scales.shape
        scales, zeros = self.every_scale(), self.every_zero()
        step = max(1, PIECE // (prod(stack) * self.width))
        for start in range(0, rows, step):
            run = slice(start, start + step)
            run_zeros = zeros[..., run, :] if zeros.dim() else zeros
            numbers = self._rows(self.codes[..., run, :], scales[..., run, :], run_zeros)[..., self.before :]
            if self.columns is not None and self.unquantized is not None:
                numbers[..., self.columns.long()] = self.unquantized[..., run, :].float()
            yield run, numbers if self.order is None else self._by_inputs(numbers, self.order)
            del numbers

    @staticmethod
    def _by_inputs(sorted_columns: Tensor, order: Tensor) -> Tensor:
        """Move columns (..., R, K) that stand in `order` to their inputs."""
        places = order.long().unsqueeze(-2).expand_as(sorted_columns)
        return torch.empty_like(sorted_columns).scatter_(-1, places, sorted_columns)

    def _in_one_kernel(self, like: Tensor) -> bool:
        plain = self.scheme.bits == 4 and like.dim() == 2 and self.unquantized is None and self.codes.is_contiguous()
        plain = plain and self.scheme.group % 8 == 0  # a word of eight codes has one scale
        return plain and uses_triton("restore", like, prefer=self.prefer)

    def numbers_of_codes(self, device: torch.device) -> Tensor:
        """Return the numbers of codes (16,) fp32, less the zero that all of them share."""
        table = torch.tensor(TABLES.get(self.scheme.codes, range(16)), dtype=torch.float32, device=device)
        return table if self.zeros is not None else table - fixed_zero(self.scheme)

    def _rows(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Decode codes (..., R, ceil(K bits / 8)) to fp32 (..., R, K)."""
        runs = grouped(self._numbers(codes), self.scheme.group)
        if self.scheme.codes not in TABLES and (zeros.dim() or float(fixed_zero(self.scheme))):
            runs.sub_(zeros.unsqueeze(-1) if zeros.dim() else zeros)
        return runs.mul_(scales.unsqueeze(-1)).flatten(-2)[..., : self.width]

    def _numbers(self, codes: Tensor) -> Tensor:
        """Return the numbers of codes, before scales and zeros, in a new tensor."""
        if self.scheme.bits == 4:
            table = self._once("pairs", partial(pairs_of, self.scheme.codes))
            return table.index_select(0, codes.flatten().int()).view(*codes.shape[:-1], -1)[..., : self.width]
        return (unpack(codes, self.scheme.bits, self.width) if self.scheme.packed else codes).float()

    def _once(self, name: str, make: Callable[[torch.device], Tensor]) -> Tensor:
        """Return a small table on the device of the tensors, made once."""
        if name not in self.tables:
            self.tables[name] = make(self.codes.device)
        return self.tables[name]

    def expert(self, number: int) -> "QuantizedMatrix":
        """Return one matrix of a stack."""
        key = f"expert {number}"
        if key not in self.prepared:
            parts: dict[str, Any] = {
                PARTS[name]: tensor if name == "columns" else tensor[number] for name, tensor in self.tensors.items()
            }
            self.prepared[key] = QuantizedMatrix(
                scheme=self.scheme, size_in=self.size_in, before=self.before, places=self.places,
                keeps_copies=self.keeps_copies, prefer=self.prefer, tables=self.tables, **parts,
            )  # fmt: skip
        expert: QuantizedMatrix = self.prepared[key]
        return expert


def pairs_of(codes: Codes, device: torch.device) -> Tensor:
    """Return the two numbers of each byte of 4-bit codes, (256, 2) fp32."""
    numbers = torch.tensor(TABLES.get(codes, range(16)), dtype=torch.float32, device=device)
    return torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)


def fixed_zero(scheme: Scheme) -> int:
    """Return the code of zero where scales have none: the middle of the range, or 0 for signed numbers."""
    return 2 ** (scheme.bits - 1) if scheme.packed and scheme.codes == "integer" else 0


def nearest(scheme: Scheme, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return codes (..., N, K), one an element, nearest to weight; scales and zeros (..., N, groups)."""
    wide = None if zeros is None else zeros.float().unsqueeze(-1)
    codes = nearest_codes(scheme, grouped(weight.float(), scheme.group), scales.float().unsqueeze(-1), wide)
    return codes.flatten(-2)[..., : weight.shape[-1]].contiguous()


def nearest_codes(scheme: Scheme, numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return codes nearest to `numbers`, computed in their dtype; scales and zeros broadcast against them."""
    if scheme.codes in TABLES:
        return table_codes(numbers / torch.where(scales == 0, torch.ones_like(scales), scales), TABLES[scheme.codes])
    if scheme.codes == "e4m3":
        return (numbers / scales).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    if zeros is not None:
        return torch.round(numbers / scales + zeros).clamp(0, 2**scheme.bits - 1).to(torch.uint8)
    most = highest(scheme.bits)
    codes = torch.round(numbers / scales).clamp(-most, most)
    return (codes + fixed_zero(scheme)).to(torch.uint8 if scheme.packed else torch.int8)


def numbers_of(scheme: Scheme, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Decode codes in the dtype of scales, against which codes and zeros broadcast."""
    if scheme.codes in TABLES:
        return torch.tensor(TABLES[scheme.codes], dtype=scales.dtype, device=codes.device)[codes.int()] * scales
    return (codes.to(scales.dtype) - (float(fixed_zero(scheme)) if zeros is None else zeros)) * scales


def assembled(
    scheme: Scheme, codes: Tensor, scales: Tensor, zeros: Tensor | None, columns: Tensor | None = None,
    unquantized: Tensor | None = None,
) -> QuantizedMatrix:  # fmt: skip
    """Assemble a matrix from codes (..., N, K), one an element, and zeros (..., N, groups)."""
    if zeros is not None:
        zeros = pack(zeros.to(torch.uint8), scheme.bits) if scheme.zeros == "whole" else zeros.half()
    outer = offset = None
    if scheme.scales == "double":
        scales, outer, offset = doubled(scales.float())
    return QuantizedMatrix(
        scheme=scheme,
        size_in=codes.shape[-1],
        codes=pack(codes, scheme.bits) if scheme.packed else codes,
        scales=scales if outer is not None else scales.to(getattr(torch, scheme.scales)),
        outer=outer,
        offset=offset,
        zeros=zeros,
        columns=columns,
        unquantized=unquantized,
    )


def cut(matrix: QuantizedMatrix, part: CodesCut) -> QuantizedMatrix:
    """Cut a part out of a whole matrix (N, K), or stack (X, N, K).

    Restored it equals, to the bit, that part of the restored whole.
    """
    lead, (rows, _) = part.box.slices[:-2], part.box.slices[-2:]
    scheme, groups = matrix.scheme, part.groups
    first, stop = part.first_code, part.first_code + part.width
    if scheme.packed:
        first, stop = first * scheme.bits // 8, -(-stop * scheme.bits // 8)

    def cut_out(tensor: Tensor, columns: slice) -> Tensor:
        return tensor[(*lead, rows, columns)].contiguous()

    zeros = matrix.zeros
    if zeros is not None and scheme.zeros == "whole":
        zeros = pack(cut_out(unpack(zeros, scheme.bits, matrix.scales.shape[-1]), groups), scheme.bits)
    elif zeros is not None:
        zeros = cut_out(zeros, groups)
    return replace(
        matrix, size_in=part.box.sizes[-1], before=part.before, places=part.places,
        codes=cut_out(matrix.codes, slice(first, stop)), scales=cut_out(matrix.scales, groups), zeros=zeros,
        outer=None if matrix.outer is None else matrix.outer[lead],
        offset=None if matrix.offset is None else matrix.offset[lead], prepared={}, tables={},
    )  # fmt: skip


def experts(stack: QuantizedMatrix, first: int, number: int) -> QuantizedMatrix:
    """Return a run of a stack's experts, as views of its tensors."""
    parts = {PARTS[name]: tensor.narrow(0, first, number) for name, tensor in stack.tensors.items()}
    return replace(stack, prepared={}, **parts)  # type: ignore[arg-type]  # fields that are tensors
