"""Linear quantization as pure functions: r = S (q - Z).

    absmax       S = max |r| / (2^(b-1) - 1), Z = 0; codes from -(2^(b-1) - 1) to 2^(b-1) - 1
    zero-point   S = (max r - min r) / (2^b - 1), Z = round(-min r / S); codes from 0 to 2^b - 1; min r <= 0 <= max r

Z is whole, which makes zero exact: padding and empty rows do not change. `share` says which numbers share S and Z: the
tensor, each row, each column, or each run of so many numbers of a row. The last run may be short.

Edge cases are the same everywhere. Numbers that are all zero have S = 1 and codes of Z. Numbers that share S with an
infinity or a NaN have S = infinity or NaN, so restored numbers are not finite either and nothing is hidden. Arithmetic
is fp32.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.spec.model.quantization_schemes import DOUBLED
from meshwright.spec.weights.boxes import ScalePlaces

Share = Literal["tensor", "row", "column"] | int
"""Numbers that share a scale. A whole number: runs of so many along the last dim."""
E4M3 = 448.0
"""Largest 8-bit number with 4 bits of exponent and 3 of mantissa."""
POWERS = 7


class Quantized(NamedTuple):
    """Codes of a matrix (rows, columns), and what they represent.

    Scale and zero have one number for those that share it, and broadcast against the codes. With runs they are (rows,
    runs).
    """

    codes: Tensor
    """Whole numbers, int32."""
    scale: Tensor
    zero: Tensor
    share: Share

    def restored(self) -> Tensor:
        """Return S (q - Z), fp32."""
        scale, zero = self.scale, self.zero
        if isinstance(self.share, int):
            columns = self.codes.shape[-1]
            scale, zero = (x.repeat_interleave(self.share, -1)[..., :columns] for x in (scale, zero))
        return dequantize(self.codes, scale, zero)


def highest(bits: int) -> int:
    """Return the largest code of absmax: 127 for 8 bits."""
    return int(2 ** (bits - 1) - 1)


def absmax_scale(peak: Tensor, bits: int) -> Tensor:
    """Return S for numbers of largest magnitude `peak`. 1 where that is 0, or so small that S would be."""
    scale = peak.float() / highest(bits)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def zero_point_grid(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return S and Z for numbers between low and high, a range that is extended to zero."""
    codes = 2**bits - 1
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    # The difference itself may be infinite.
    scale = high / codes - low / codes
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return scale, torch.round(-low / scale)


def quantize(x: Tensor, scale: Tensor, zero: Tensor | float, low: int, high: int) -> Tensor:
    """Return q = round(r / S) + Z within low .. high, in fp32. NaN where r / S is NaN."""
    codes: Tensor = (torch.round(x.float() / scale) + zero).clamp(low, high)
    return codes


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | float) -> Tensor:
    """Return r = S (q - Z), fp32."""
    numbers: Tensor = (codes.float() - zero) * scale
    return numbers


def grouped(x: Tensor, size: int) -> Tensor:
    """Split x (..., K) into (..., runs, size), the last run filled with zeros. Size 0: one run."""
    size = size or x.shape[-1]
    missing = -x.shape[-1] % size
    filled = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return (
        filled.view(*filled.shape[:-1], -1, size)
        if filled.is_contiguous()
        else filled.reshape(*filled.shape[:-1], -1, size)
    )


def absmax(x: Tensor, bits: int = 8, share: Share = "tensor") -> Quantized:
    """Quantize x (rows, columns) symmetrically."""
    runs = _runs(x, share)
    scale = absmax_scale(runs.abs().amax(_dims(share), keepdim=True), bits)
    codes = quantize(runs, scale, 0.0, -highest(bits), highest(bits))
    return _assembled(codes, scale, torch.zeros_like(scale), x, share)


def zero_point(x: Tensor, bits: int = 8, share: Share = "tensor") -> Quantized:
    """Quantize x (rows, columns) asymmetrically."""
    runs, dims = _runs(x, share), _dims(share)
    scale, zero = zero_point_grid(runs.amin(dims, keepdim=True), runs.amax(dims, keepdim=True), bits)
    return _assembled(quantize(runs, scale, zero, 0, 2**bits - 1), scale, zero, x, share)


def _runs(x: Tensor, share: Share) -> Tensor:
    return grouped(x.float(), share) if isinstance(share, int) else x.float()


def _dims(share: Share) -> tuple[int, ...]:
    return {"tensor": (0, 1), "row": (1,), "column": (0,)}[share] if isinstance(share, str) else (-1,)


def _assembled(codes: Tensor, scale: Tensor, zero: Tensor, x: Tensor, share: Share) -> Quantized:
    if isinstance(share, int):
        codes, scale, zero = codes.flatten(-2)[..., : x.shape[-1]], scale.squeeze(-1), zero.squeeze(-1)
    # The scale of such codes is not finite, and says so. NaN has no whole number.
    integers = torch.nan_to_num(codes, nan=0.0).int()
    return Quantized(integers, scale, zero, share)


def table_codes(x: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return the index of the number nearest to x, uint8. NaN counts as the largest."""
    # bucketize wants ascending numbers, and `places` leads back to the order of the table.
    table, places = torch.tensor(numbers, dtype=torch.float32, device=x.device).sort(stable=True)
    codes = torch.bucketize(x.float().contiguous(), (table[1:] + table[:-1]) / 2, out_int32=True)
    return (codes if sorted(numbers) == list(numbers) else places[codes]).to(torch.uint8)


def e4m3_scale(peak: Tensor) -> Tensor:
    """Return the scale that maps `peak` to 448, the largest number of e4m3."""
    scale = peak.float() / E4M3
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., K) uint8 below 2^bits into bytes (..., ceil(K bits / 8)), the first code in the lowest bits.

    The rest of the last byte is 0.
    """
    if bits == 4:
        pairs = grouped(codes, 2)
        return (pairs[..., 0] | pairs[..., 1] << 4).contiguous()
    columns = codes.shape[-1]
    filled = grouped(codes, 8)
    shifts = torch.arange(0, 8 * bits, bits, device=codes.device)
    # Eight codes are as many bytes as a code has bits.
    words = (filled.long() << shifts).sum(-1, keepdim=True)
    parts = (words >> torch.arange(0, 8 * bits, 8, device=codes.device)) & 0xFF
    return parts.to(torch.uint8).flatten(-2)[..., : -(-columns * bits // 8)].contiguous()


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Unpack codes (..., columns), uint8."""
    if bits == 4:
        halves = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
        return halves[..., :columns]
    parts = grouped(packed, bits).long()
    words = (parts << torch.arange(0, 8 * bits, 8, device=packed.device)).sum(-1, keepdim=True)
    codes = (words >> torch.arange(0, 8 * bits, bits, device=packed.device)) & (2**bits - 1)
    unpacked: Tensor = codes.to(torch.uint8).flatten(-2)[..., :columns]
    return unpacked


def _dynamic_numbers() -> tuple[float, ...]:
    """Compute the table in fp32, with the roundings of torch on a CPU, which stored files have."""
    numbers = [0.0, 1.0]
    for power in range(POWERS):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32, device="cpu")
        middles = 10 ** (power - POWERS + 1) * ((edges[:-1] + edges[1:]) / 2.0)
        numbers += [*middles.tolist(), *(-middles).tolist()]
    return tuple(sorted(numbers))


DYNAMIC = _dynamic_numbers()
"""The table: 256 numbers, ascending."""


def dynamic_table(device: torch.device) -> Tensor:
    """Return the table (256,) fp32 on a device."""
    return torch.tensor(DYNAMIC, dtype=torch.float32, device=device)


def doubled(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize scales (..., N, groups) fp32 again: S = outer * table[code] + offset.

    Double quantization (Dettmers et al. 2023, arXiv:2305.14314, section 3). The offset is the mean of a matrix's
    scales. `outer` holds the largest magnitude of each run of 256 of them, row after row. The table is the signed
    dynamic one of Dettmers 2016 (arXiv:1511.04561): seven powers of ten, the finer cut the larger they are.

    Returns codes of their size uint8, outer (..., ceil(N groups / 256)), offset (..., 1).
    """
    flat = scales.flatten(-2)
    offset = flat.mean(-1, keepdim=True)
    runs = grouped(flat - offset, min(DOUBLED, flat.shape[-1]))
    outer = runs.abs().amax(-1)
    shares = runs / torch.where(outer == 0, torch.ones_like(outer), outer).unsqueeze(-1)
    table = dynamic_table(scales.device)
    codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return codes.flatten(-2)[..., : flat.shape[-1]].view(scales.shape).contiguous(), outer, offset


def undoubled(codes: Tensor, outer: Tensor, offset: Tensor, table: Tensor, places: ScalePlaces | None = None) -> Tensor:
    """Return scales (..., N, groups) fp32 from their codes and `dynamic_table`.

    Args:
        places: Position of the codes in a larger matrix, to which outer and offset belong. None = they are all.
    """
    flat = codes.flatten(-2)
    numbers = table.index_select(0, flat.flatten().int()).view(flat.shape)
    if places is None:
        wide = outer.repeat_interleave(DOUBLED, -1)[..., : flat.shape[-1]]
    else:
        wide = outer.index_select(-1, _run_indices(places, codes.shape[-2], codes.shape[-1], codes.device))
    scales: Tensor = numbers.mul_(wide).add_(offset).view(codes.shape)
    return scales


def _run_indices(places: ScalePlaces, rows: int, groups: int, device: torch.device) -> Tensor:
    """Return the run of the whole matrix in which each scale (rows groups,) lies."""
    row = torch.arange(places.row, places.row + rows, dtype=torch.int32, device=device)
    group = torch.arange(places.group, places.group + groups, dtype=torch.int32, device=device)
    return ((row * places.groups).unsqueeze(1) + group).flatten() // DOUBLED
