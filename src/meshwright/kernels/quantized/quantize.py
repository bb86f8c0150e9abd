"""Quantization of a matrix by a scheme without data: some rows at a time, which bounds the temporary memory.

For a calibrated scheme the result is that of round-to-nearest.

A rank's part of a matrix is quantized to exactly the numbers that it has in the quantized whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.quantized.matrix import PARTS, QuantizedMatrix, assembled, nearest
from meshwright.kernels.quantized.rounding import (
    absmax_scale,
    doubled,
    e4m3_scale,
    grouped,
    highest,
    quantize,
    zero_point_grid,
)
from meshwright.spec.errors import PlanError
from meshwright.spec.model.quantization_schemes import PIECE, TABLES, Scheme
from meshwright.spec.weights.boxes import CodesCut

NORM, PENALTY, GROWTH, TURNS = 0.7, 10.0, 1.01, 20
"""p; the first penalty and its growth per turn; number of turns. All as published."""


def find_zeros(runs: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Find real zeros Z (..., groups) for runs (..., groups, size) with scales and first zeros (..., groups), fp32.

    Half-quadratic quantization (Badri and Shaji 2023, https://mobiusml.github.io/hqq_blog):

        min over Z of |W - S (Q - Z)|_p, p < 1, which forgives a few large errors for many small ones

    It is split in two: E, the errors that are large, by shrinking; and Z, the mean over each group of Q - (W - E) / S.
    A few turns of both follow, each with a larger penalty. With weights of the usual size, some hundredths, the
    published penalty lets no error be large, and Z is that of least squares.

    Z is a real number. Rounded to a whole one it would be no better than that of round-to-nearest, and zero itself is
    then off by less than half a step. The first zeros are real, too: from rounded ones the turns end at a worse
    optimum. They stay where scales are so small that 1 over them is not finite.
    """
    wide, shifts, penalty = 1 / scales.unsqueeze(-1), zeros.unsqueeze(-1), PENALTY
    for _ in range(TURNS):
        codes = (runs * wide + shifts).round().clamp(0, 2**bits - 1)
        large = shrunk(runs - (codes - shifts) / wide, penalty)
        shifts = (codes - (runs - large) * wide).mean(-1, keepdim=True)
        penalty *= GROWTH
    shifts = shifts.squeeze(-1)
    return torch.where(shifts.isfinite(), shifts, zeros)


def shrunk(x: Tensor, penalty: float) -> Tensor:
    """Return nearly the e that minimizes |e|^p + penalty / 2 (e - x)^2: x less a step, larger for smaller x."""
    size = x.abs()
    shrunken: Tensor = x.sign() * (size - size.clamp(min=1e-12).pow(NORM - 1) / penalty).clamp(min=0)
    return shrunken


def quantize_matrix(
    name: str,
    weight: Tensor,
    scheme: Scheme,
    columns: Tensor | None = None,
    columns_dtype: torch.dtype = torch.bfloat16,
) -> QuantizedMatrix:
    """Quantize a matrix (N, K) or a stack (X, N, K).

    Args:
        name: Name for errors.
        columns: Inputs (O,) that stay unquantized, in `columns_dtype`, and do not count for the scales.

    Raises:
        PlanError: The matrix has numbers that are not finite, or too large for its scales.
    """
    check_finite(name, weight.detach())
    matrix = coded(weight, scheme, columns, columns_dtype)
    check_scales(name, scheme, matrix.scales if matrix.offset is None else matrix.offset)
    return matrix


def coded(
    weight: Tensor, scheme: Scheme, columns: Tensor | None = None, columns_dtype: torch.dtype = torch.bfloat16
) -> QuantizedMatrix:
    """Quantize numbers that are known to be finite, without waiting for the device."""
    columns = columns if columns is not None and len(columns) else None
    pieces = in_pieces(weight.detach())
    whole = None
    if scheme.weight_share == "tensor":
        peaks = [extremes(grouped(_filled(piece, columns), scheme.group), scheme).amax(-2) for piece in pieces]
        whole = torch.stack(peaks).amax(0).unsqueeze(-2)
    matrix = joined([_quantized(piece, scheme, columns, columns_dtype, whole) for piece in pieces])
    # Scales are quantized after all pieces: their mean and their runs go over the whole matrix.
    if scheme.scales == "double":
        matrix.scales, matrix.outer, matrix.offset = doubled(matrix.scales)
    return replace(matrix, scheme=scheme)


def _filled(weight: Tensor, columns: Tensor | None) -> Tensor:
    """Return rows (..., R, K) in fp32, with zeros in the columns that are not rounded."""
    wide = weight.float()
    return wide if columns is None else wide.index_fill(-1, columns.long(), 0.0)


def _quantized(
    weight: Tensor, scheme: Scheme, columns: Tensor | None, dtype: torch.dtype, whole: Tensor | None
) -> QuantizedMatrix:
    """Quantize rows (..., R, K). Scales that will be codes are still fp32.

    whole: Extremes (sides, ..., 1, 1) of a matrix that has one scale, which each row repeats. None = of each row.
    """
    plain = replace(scheme, scales="float32") if scheme.scales == "double" else scheme
    wide = _filled(weight, columns)
    unquantized = None if columns is None else weight[..., columns.long()].to(dtype).contiguous()
    if whole is None:
        scales, zeros = scales_of(wide, plain)
    else:
        scales, zeros = grid_of(whole.expand(-1, *wide.shape[:-1], 1).contiguous(), plain)
    return assembled(plain, nearest(plain, wide, scales, zeros), scales, zeros, columns, unquantized)


def in_pieces(weight: Tensor) -> Sequence[Tensor]:
    """Split a matrix, or each of a stack, into runs of rows (..., R, K) that are rounded at a time."""
    *stack, _, inputs = weight.shape
    pieces: Sequence[Tensor] = weight.split(max(1, PIECE // (inputs * max(1, prod(stack)))), -2)
    return pieces


def joined(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Join the rows of one matrix, or of each of a stack."""
    first = parts[0]
    if len(parts) == 1:
        return first
    whole: dict[str, Any] = {
        PARTS[name]: first.columns if name == "columns" else torch.cat([part.tensors[name] for part in parts], -2)
        for name in first.tensors
    }
    return replace(first, **whole)


def check_finite(name: str, weight: Tensor) -> None:
    """Raise PlanError for a matrix with numbers that are not finite."""
    if not bool(weight.isfinite().all()):
        count = int((~weight.isfinite()).sum())
        raise PlanError(f"{name} cannot be quantized: {count} of its weights are infinite or NaN")


def check_scales(name: str, scheme: Scheme, scales: Tensor) -> None:
    """Raise PlanError for a matrix whose scales overflow their dtype."""
    if not bool(scales.isfinite().all()):
        dtype = "fp32" if scheme.scales == "double" else scheme.scales
        raise PlanError(
            f"{name} has weights that are too large for scales in {dtype}: take format=meshwright, or keep it"
        )


def scales_of(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Return scales (..., N, groups), in their stored dtype, and zeros of their size, for a finite matrix."""
    runs = grouped(weight, scheme.group)
    scales, zeros = grid_of(extremes(runs, scheme), scheme)
    if scheme.zeros == "real" and zeros is not None:
        # Rounded to the fp16 in which they are stored, before codes are made for them.
        return scales, find_zeros(runs, scales.float(), zeros, scheme.bits).half().float()
    return scales, zeros


def extremes(runs: Tensor, scheme: Scheme) -> Tensor:
    """Return the numbers that determine scales, for runs (..., N, groups, size).

    That is the largest distance from zero (1, ..., N, groups), or the largest below and above it (2, ..., N, groups).
    None is negative, so parts of a run combine by a maximum.
    """
    if scheme.zeros == "fixed":
        return runs.abs().amax(-1).unsqueeze(0)
    return torch.stack((-runs.amin(-1).clamp(max=0), runs.amax(-1).clamp(min=0)))


def grid_of(extreme: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Return scales, in their stored dtype, and zeros of their size, from extremes.

    Real zeros are the ones to begin with (`find_zeros`). Normal floats of zeros have a scale of 0, as in bitsandbytes:
    where scales are codes, 1 would coarsen those of others.
    """
    if scheme.zeros == "fixed":
        (peaks,) = extreme
        if scheme.codes in TABLES:
            return peaks.to(getattr(torch, scheme.scales)), None
        return _stored(e4m3_scale(peaks) if scheme.codes == "e4m3" else absmax_scale(peaks, scheme.bits), scheme), None
    low, high = -extreme[0], extreme[1]
    scales = _stored(zero_point_grid(low, high, scheme.bits)[0], scheme)
    zeros = (-low / scales.float()).clamp(0, 2**scheme.bits - 1)
    return scales, zeros if scheme.zeros == "real" else zeros.round()


def _stored(scales: Tensor, scheme: Scheme) -> Tensor:
    """Round scales to their stored dtype. 1 replaces what would be rounded to 0."""
    rounded = scales.to(getattr(torch, scheme.scales))
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


def relative_error(weight: Tensor, matrix: QuantizedMatrix) -> float:
    """Return |W - W'| / |W| of the whole, computed some rows at a time. 0 for zeros."""
    norms = []
    for rows, restored in matrix.restored_rows():
        exact = weight.detach()[..., rows, :].float()
        norms.append(torch.stack((exact.norm(), restored.sub_(exact).norm())))
        # Else the next piece would be made while this one is still held.
        del exact, restored
    size, error = torch.stack(norms).norm(dim=0).tolist()
    return float(error / size) if size else 0.0


Largest = Callable[[Tensor], Tensor]
"""Reduces numbers >= 0 of this rank to the largest over all ranks that hold parts."""


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A part (..., n, k) whose scales depend on numbers that other ranks hold (spec/weights/boxes.py)."""

    cut: CodesCut
    largest: Largest

    def coded(self, weight: Tensor) -> QuantizedMatrix:
        """Quantize as in the whole matrix. Every rank that holds a part must call it."""
        cut, scheme = self.cut, self.cut.scheme
        plain = replace(scheme, scales="float32") if scheme.scales == "double" else scheme
        filled = F.pad(weight, (cut.before, 0)) if cut.before else weight
        scales, zeros = grid_of(self.largest(self._extremes(filled, scheme)), plain)
        outer = offset = None
        # Codes are those for the scales before these become codes, as in `coded`.
        matrix = _nearest(plain, filled, self._local(scales), None if zeros is None else self._local(zeros))
        if scheme.scales == "double":
            scales, outer, offset = doubled(scales)
            matrix.scales = self._local(scales)
        return replace(
            matrix, scheme=scheme, size_in=weight.shape[-1], before=cut.before, places=cut.places, outer=outer,
            offset=offset,
        )  # fmt: skip

    def _extremes(self, filled: Tensor, scheme: Scheme) -> Tensor:
        """Return the extremes of the whole matrix, with zeros for what other ranks hold.

        NaN counts as infinite: a maximum may drop it.
        """
        *stack, _, _ = filled.shape
        rows, columns = self.cut.box.whole[-2:]
        sides = 1 if scheme.zeros == "fixed" else 2
        extremes_of_all = torch.zeros(
            sides, *stack, rows, scheme.groups(columns), dtype=torch.float32, device=filled.device
        )
        parts = [extremes(grouped(piece.float(), scheme.group), scheme) for piece in in_pieces(filled)]
        self._local(extremes_of_all).copy_(torch.cat(parts, -2).nan_to_num_(nan=inf, posinf=inf))
        return extremes_of_all

    def _local(self, whole: Tensor) -> Tensor:
        """Select this part's scales from those of the whole matrix (..., N, groups)."""
        return whole[..., self.cut.box.slices[-2], self.cut.groups]


def _nearest(scheme: Scheme, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> QuantizedMatrix:
    """Quantize with known scales and zeros."""
    pieces = in_pieces(weight)
    sizes = [piece.shape[-2] for piece in pieces]
    zero_parts = zeros.split(sizes, -2) if zeros is not None else [None] * len(pieces)
    parts = zip(pieces, scales.split(sizes, -2), zero_parts, strict=True)
    return joined([assembled(scheme, nearest(scheme, piece, scale, zero), scale, zero) for piece, scale, zero in parts])


def part_of_rows(rows: Tensor, largest: Largest) -> tuple[Tensor, Tensor]:
    """Round rows as kernels.quantized_linear.row_codes does for whole rows.

    Returns the codes of this rank's part (M, k), and scales (M, 1).
    """
    peaks = rows.float().abs().amax(1, keepdim=True).nan_to_num_(nan=inf, posinf=inf)
    scales = absmax_scale(largest(peaks), 8)
    return quantize(rows, scales, 0.0, -highest(8), highest(8)), scales
