"""A matrix, or a stack of them, as codes and scales: one representation for every device, file and method.

    codes    (..., N, K) int8 or e4m3; fewer bits: bytes (..., N, ceil(K bits / 8)), the first code in the lowest bits
    scales   (..., N, groups)
    zeros    Z, whole ones as bytes (..., N, ceil(groups bits / 8)), real ones (..., N, groups); None = a fixed one
    columns  (O,) int32 and kept (..., N, O): inputs whose weights are not quantized; their codes are those of zero

What a device multiplies with is made of it at the first product (kernels/quantized_linear.py).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.quantization import grouped, highest, nf4_codes, pack, unpack
from meshwright.spec.quantization_schemes import NF4, Scheme


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
    prepared: dict[str, Any] = field(default_factory=dict)
    """What products made of it for this device."""

    @property
    def size_out(self) -> int:
        """N."""
        return self.scales.shape[-2]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By name, those that there are."""
        found = {name: getattr(self, name) for name in ("codes", "scales", "zeros", "columns", "kept")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def every_zero(self) -> Tensor:
        """Z (..., N, groups), or one number, fp32."""
        if self.zeros is None:
            return torch.tensor(float(fixed_zero(self.scheme)), device=self.scales.device)
        whole = self.scheme.zeros == "whole"
        return (unpack(self.zeros, self.scheme.bits, self.scales.shape[-1]) if whole else self.zeros).float()

    def whole_codes(self) -> Tensor:
        """Codes (..., N, K), one an element."""
        return unpack(self.codes, self.scheme.bits, self.size_in) if self.scheme.packed else self.codes

    def dequantized(self) -> Tensor:
        """(..., N, K) fp32."""
        codes, scheme = self.whole_codes(), self.scheme
        zeros = None if self.zeros is None else self.every_zero().unsqueeze(-1)
        runs = numbers_of(scheme, grouped(codes, scheme.group), self.scales.float().unsqueeze(-1), zeros)
        found = runs.flatten(-2)[..., : self.size_in]
        if self.columns is not None and self.kept is not None:
            found[..., self.columns.long()] = self.kept.float()
        return found

    def expert(self, number: int) -> "QuantizedMatrix":
        """One of a stack."""
        key = f"expert {number}"
        if key not in self.prepared:
            parts: dict[str, Any] = {
                name: one if name == "columns" else one[number] for name, one in self.tensors.items()
            }
            self.prepared[key] = QuantizedMatrix(scheme=self.scheme, size_in=self.size_in, **parts)
        found: QuantizedMatrix = self.prepared[key]
        return found


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
    if scheme.codes == "nf4":
        return nf4_codes(numbers / scales)
    if scheme.codes == "e4m3":
        return (numbers / scales).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    if zeros is not None:
        return torch.round(numbers / scales + zeros).clamp(0, 2**scheme.bits - 1).to(torch.uint8)
    most = highest(scheme.bits)
    codes = torch.round(numbers / scales).clamp(-most, most)
    return (codes + fixed_zero(scheme)).to(torch.uint8 if scheme.packed else torch.int8)


def numbers_of(scheme: Scheme, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """What codes stand for, in the dtype of scales, against which codes and zeros broadcast."""
    if scheme.codes == "nf4":
        return torch.tensor(NF4, dtype=scales.dtype, device=codes.device)[codes.int()] * scales
    return (codes.to(scales.dtype) - (float(fixed_zero(scheme)) if zeros is None else zeros)) * scales


def assembled(
    scheme: Scheme, codes: Tensor, scales: Tensor, zeros: Tensor | None, columns: Tensor | None = None,
    kept: Tensor | None = None,
) -> QuantizedMatrix:  # fmt: skip
    """Of codes (..., N, K), one an element, and zeros (..., N, groups)."""
    if zeros is not None:
        zeros = pack(zeros.to(torch.uint8), scheme.bits) if scheme.zeros == "whole" else zeros.half()
    return QuantizedMatrix(
        scheme=scheme,
        size_in=codes.shape[-1],
        codes=pack(codes, scheme.bits) if scheme.packed else codes,
        scales=scales.to(getattr(torch, scheme.scales)),
        zeros=zeros,
        columns=columns,
        kept=kept,
    )
