"""A rank's part of a matrix, quantized to exactly the numbers that it has in the quantized whole."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.quantized.matrix import QuantizedMatrix, assembled, nearest
from meshwright.kernels.quantized.quantize import extremes, grid_of, in_pieces, joined
from meshwright.kernels.quantized.rounding import absmax_scale, doubled, grouped, highest, quantize
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.spec.weights.boxes import CodesCut

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
        whole = torch.zeros(sides, *stack, rows, scheme.groups(columns), dtype=torch.float32, device=filled.device)
        parts = [extremes(grouped(piece.float(), scheme.group), scheme) for piece in in_pieces(filled)]
        self._local(whole).copy_(torch.cat(parts, -2).nan_to_num_(nan=inf, posinf=inf))
        return whole

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
