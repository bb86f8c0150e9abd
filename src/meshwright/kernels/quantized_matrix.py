"""A matrix, or a stack of them, as codes and scales: one representation for every device, file and method.

    codes    (..., N, K) int8 or e4m3; fewer bits: bytes (..., N, ceil(K bits / 8)), the first code in the lowest bits
    scales   (..., N, groups); doubled ones are codes, with outer (..., ceil(N groups / 256)) and offset (..., 1)
    zeros    Z, whole ones as bytes (..., N, ceil(groups bits / 8)), real ones (..., N, groups); None = a fixed one
    columns  (O,) int32 and kept (..., N, O): inputs whose weights are not quantized; their codes are those of zero
    order    (..., K) int32: which input each column of codes is for; None = the first for the first

What a device multiplies with is made of it at the first product (kernels/quantized_linear.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.chooser import uses_triton
from meshwright.kernels.doubled_scales import doubled, dynamic_table, undoubled
from meshwright.kernels.quantization import grouped, highest, pack, table_codes, unpack
from meshwright.spec.code_cuts import ScalePlaces
from meshwright.spec.quantization_schemes import PIECE, TABLES, Codes, Scheme

PARTS = ("codes", "scales", "outer", "offset", "zeros", "columns", "kept", "order")
"""Tensors of a matrix, as QuantizedMatrix has them."""


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
    kept: Tensor | None = None
    outer: Tensor | None = None
    offset: Tensor | None = None
    order: Tensor | None = None
    before: int = 0
    """Of a part whose first group began with other inputs: so many codes of a row stand for those."""
    places: ScalePlaces | None = None
    """Of a part of a larger matrix, where its scales stand in that."""
    keeps_copies: bool = True
    """Whether products may keep a restored copy beside it; beside adapters none outlives its product."""
    prefer: str = "auto"
    """As kernels.chooser's."""
    prepared: dict[str, Any] = field(default_factory=dict)
    """What products made of it for this device."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    """Of some hundred numbers, where its tensors are; experts have those of their stack."""

    @property
    def size_out(self) -> int:
        """N."""
        return self.scales.shape[-2]

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Of a copy, which makes what products need anew: oneDNN's tensors and places in memory cannot be copied."""
        fresh: dict[str, Any] = {"prepared": {}, "tables": {}}
        return None, {one.name: getattr(self, one.name) for one in fields(self)} | fresh

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name, those that there are."""
        found = {name: getattr(self, name) for name in PARTS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def in_order_of_codes(self) -> "QuantizedMatrix":
        """The same for inputs that stand in `order`."""
        if "in order of codes" not in self.prepared:
            self.prepared["in order of codes"] = replace(self, order=None, prepared={})
        found: QuantizedMatrix = self.prepared["in order of codes"]
        return found

    def every_zero(self) -> Tensor:
        """Z (..., N, groups), or one number, fp32."""
        if self.zeros is None:
            return torch.tensor(float(fixed_zero(self.scheme)), device=self.scales.device)
        whole = self.scheme.zeros == "whole"
        return (unpack(self.zeros, self.scheme.bits, self.scales.shape[-1]) if whole else self.zeros).float()

    def whole_codes(self) -> Tensor:
        """Codes (..., N, K), one an element."""
        found = unpack(self.codes, self.scheme.bits, self.width) if self.scheme.packed else self.codes
        return found[..., self.before :]

    @property
    def width(self) -> int:
        """Codes of a row."""
        return self.before + self.size_in

    def every_scale(self) -> Tensor:
        """S (..., N, groups) fp32."""
        if self.outer is None or self.offset is None:
            return self.scales.float()
        return undoubled(self.scales, self.outer, self.offset, self._once("table", dynamic_table), self.places)

    def scales_and_shifts(self) -> Tensor:
        """(groups, N, 2) bf16: s and z of (q - 8) s + z, as torch's 4-bit products read them."""
        scales = self.scales.float()
        shifts = (8.0 - self.every_zero()) * scales
        return torch.stack((scales, shifts), dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()

    def dequantized(self) -> Tensor:
        """(..., N, K) fp32."""
        return self.restored(torch.float32)

    def restored(self, dtype: torch.dtype) -> Tensor:
        """(..., N, K), in fp32 rounded once, some rows at a time."""
        if self.order is not None:
            return self._by_inputs(self.in_order_of_codes.restored(dtype), self.order)
        *stack, rows, _ = self.scales.shape
        found = torch.empty(*stack, rows, self.size_in, dtype=dtype, device=self.codes.device)
        if not self._in_one_kernel(found):
            for some, numbers in self.restored_rows():
                found[..., some, :] = numbers
                del numbers
            return found
        from meshwright.kernels.triton import restoring

        found = found.new_empty(rows, self.width) if self.before else found
        restoring.restore(self.packed(), found)
        return found[..., self.before :].contiguous() if self.before else found

    def packed(self) -> Any:
        """Codes, scales and zeros as Triton's kernels read them (kernels/triton/code_words.py): made once, but for
        scales that are codes themselves where no copy may stay."""
        if "packed" in self.prepared:
            return self.prepared["packed"]
        from meshwright.kernels.triton.code_words import PackedMatrix

        table = self._once("table of codes", self.numbers_of_codes) if self.scheme.codes in TABLES else None
        scales = self.scales if self.outer is None else self.every_scale()
        made = PackedMatrix(
            self.codes.contiguous(), scales.contiguous(), self.zeros, table, self.size_in, self.scheme.group
        )
        if self.outer is None or self.keeps_copies:
            self.prepared["packed"] = made
        return made

    def restored_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Where rows stand among N, and they (..., R, K) fp32, as many at a time as PIECE says."""
        *stack, rows, _ = self.scales.shape
        scales, zeros = self.every_scale(), self.every_zero()
        step = max(1, PIECE // (prod(stack) * self.width))
        for start in range(0, rows, step):
            some = slice(start, start + step)
            own = zeros[..., some, :] if zeros.dim() else zeros
            found = self._rows(self.codes[..., some, :], scales[..., some, :], own)[..., self.before :]
            if self.columns is not None and self.kept is not None:
                found[..., self.columns.long()] = self.kept[..., some, :].float()
            yield some, found if self.order is None else self._by_inputs(found, self.order)
            del found

    @staticmethod
    def _by_inputs(sorted_columns: Tensor, order: Tensor) -> Tensor:
        """Columns (..., R, K) that stand in `order`, where their inputs are."""
        places = order.long().unsqueeze(-2).expand_as(sorted_columns)
        return torch.empty_like(sorted_columns).scatter_(-1, places, sorted_columns)

    def _in_one_kernel(self, like: Tensor) -> bool:
        plain = self.scheme.bits == 4 and like.dim() == 2 and self.kept is None and self.codes.is_contiguous()
        plain = plain and self.scheme.group % 8 == 0  # a word of eight codes has one scale
        return plain and uses_triton("restore", like, prefer=self.prefer)

    def numbers_of_codes(self, device: torch.device) -> Tensor:
        """(16,) fp32, less the zero that all of them share."""
        table = torch.tensor(TABLES.get(self.scheme.codes, range(16)), dtype=torch.float32, device=device)
        return table if self.zeros is not None else table - fixed_zero(self.scheme)

    def _rows(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """What codes (..., R, ceil(K bits / 8)) stand for, fp32 (..., R, K)."""
        runs = grouped(self._numbers(codes), self.scheme.group)
        if self.scheme.codes not in TABLES and (zeros.dim() or float(fixed_zero(self.scheme))):
            runs.sub_(zeros.unsqueeze(-1) if zeros.dim() else zeros)
        return runs.mul_(scales.unsqueeze(-1)).flatten(-2)[..., : self.width]

    def _numbers(self, codes: Tensor) -> Tensor:
        """Numbers that codes name, before scales and zeros; a tensor of its own."""
        if self.scheme.bits == 4:
            table = self._once("pairs", partial(pairs_of, self.scheme.codes))
            return table.index_select(0, codes.flatten().int()).view(*codes.shape[:-1], -1)[..., : self.width]
        return (unpack(codes, self.scheme.bits, self.width) if self.scheme.packed else codes).float()

    def _once(self, name: str, make: Callable[[torch.device], Tensor]) -> Tensor:
        """A small table where its tensors are."""
        if name not in self.tables:
            self.tables[name] = make(self.codes.device)
        return self.tables[name]

    def expert(self, number: int) -> "QuantizedMatrix":
        """One of a stack."""
        key = f"expert {number}"
        if key not in self.prepared:
            parts: dict[str, Any] = {
                name: one if name == "columns" else one[number] for name, one in self.tensors.items()
            }
            self.prepared[key] = QuantizedMatrix(
                scheme=self.scheme, size_in=self.size_in, before=self.before, places=self.places,
                keeps_copies=self.keeps_copies, prefer=self.prefer, tables=self.tables, **parts,
            )  # fmt: skip
        found: QuantizedMatrix = self.prepared[key]
        return found


def pairs_of(codes: Codes, device: torch.device) -> Tensor:
    """(256, 2) fp32: the two numbers of each byte of 4-bit codes."""
    numbers = torch.tensor(TABLES.get(codes, range(16)), dtype=torch.float32, device=device)
    return torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)


def fixed_zero(scheme: Scheme) -> int:
    """The code of zero where no scale has its own: the middle of what bits can say, or 0 of signed numbers."""
    return 2 ** (scheme.bits - 1) if scheme.packed and scheme.codes == "integer" else 0


def nearest(scheme: Scheme, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Codes (..., N, K), one an element, of the numbers nearest to weight; scales and zeros (..., N, groups)."""
    wide = None if zeros is None else zeros.float().unsqueeze(-1)
    found = nearest_codes(scheme, grouped(weight.float(), scheme.group), scales.float().unsqueeze(-1), wide)
    return found.flatten(-2)[..., : weight.shape[-1]].contiguous()


def nearest_codes(scheme: Scheme, numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Codes of the size of `numbers`, in whose dtype they are found; scales and zeros broadcast against them."""
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
    """What codes stand for, in the dtype of scales, against which codes and zeros broadcast."""
    if scheme.codes in TABLES:
        return torch.tensor(TABLES[scheme.codes], dtype=scales.dtype, device=codes.device)[codes.int()] * scales
    return (codes.to(scales.dtype) - (float(fixed_zero(scheme)) if zeros is None else zeros)) * scales


def assembled(
    scheme: Scheme, codes: Tensor, scales: Tensor, zeros: Tensor | None, columns: Tensor | None = None,
    kept: Tensor | None = None,
) -> QuantizedMatrix:  # fmt: skip
    """Of codes (..., N, K), one an element, and zeros (..., N, groups)."""
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
        kept=kept,
    )
