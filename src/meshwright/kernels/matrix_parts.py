"""A rank's part of a matrix, rounded to the very numbers that it has in the rounded whole."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.doubled_scales import doubled
from meshwright.kernels.quantization import absmax_scale, grouped, highest, quantize
from meshwright.kernels.quantized_matrix import QuantizedMatrix, assembled, nearest
from meshwright.kernels.weight_codes import extremes, grid_of, in_pieces, joined
from meshwright.spec.code_cuts import CodesCut
from meshwright.spec.quantization_schemes import Scheme

Largest = Callable[[Tensor], Tensor]
"""Numbers of this rank, none below zero -> in their place the largest of all ranks that hold parts."""


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A part (..., n, k) whose scales are made of numbers that other ranks hold (spec/shared_scales.py)."""

    cut: CodesCut
    largest: Largest

    def coded(self, weight: Tensor) -> QuantizedMatrix:
        """Its codes in the whole matrix's. Every rank that holds a part calls it."""
        cut, scheme = self.cut, self.cut.scheme
        plain = replace(scheme, scales="float32") if scheme.scales == "double" else scheme
        filled = F.pad(weight, (cut.before, 0)) if cut.before else weight
        scales, zeros = grid_of(self.largest(self._extremes(filled, scheme)), plain)
        outer = offset = None
        found = _nearest(plain, filled, self._own(scales), None if zeros is None else self._own(zeros))
        if scheme.scales == "double":
            scales, outer, offset = doubled(scales)
            found.scales = self._own(scales)
        return replace(
            found, scheme=scheme, size_in=weight.shape[-1], before=cut.before, places=cut.places, outer=outer,
            offset=offset,
        )  # fmt: skip

    def _extremes(self, filled: Tensor, scheme: Scheme) -> Tensor:
        """Of the whole matrix, with zeros for what is not here. What is no number counts as infinite: a largest number
        may leave it out."""
        *stack, _, _ = filled.shape
        rows, columns = self.cut.box.whole[-2:]
        sides = 1 if scheme.zeros == "fixed" else 2
        whole = torch.zeros(sides, *stack, rows, scheme.groups(columns), dtype=torch.float32, device=filled.device)
        found = [extremes(grouped(piece.float(), scheme.group), scheme) for piece in in_pieces(filled)]
        self._own(whole).copy_(torch.cat(found, -2).nan_to_num_(nan=inf, posinf=inf))
        return whole

    def _own(self, whole: Tensor) -> Tensor:
        """Of numbers (..., N, groups) for the scales of the whole matrix, those for what is here."""
        return whole[..., self.cut.box.slices[-2], self.cut.groups]


def _nearest(scheme: Scheme, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> QuantizedMatrix:
    """Codes for scales and zeros that are known."""
    pieces = in_pieces(weight)
    sizes = [piece.shape[-2] for piece in pieces]
    some = zeros.split(sizes, -2) if zeros is not None else [None] * len(pieces)
    each = zip(pieces, scales.split(sizes, -2), some, strict=True)
    return joined([assembled(scheme, nearest(scheme, piece, own, zero), own, zero) for piece, own, zero in each])


def part_of_rows(rows: Tensor, largest: Largest) -> tuple[Tensor, Tensor]:
    """As kernels.quantized_linear.row_codes of whole rows: the codes of this rank's part (M, k), and scales (M, 1)."""
    peaks = rows.float().abs().amax(1, keepdim=True).nan_to_num_(nan=inf, posinf=inf)
    scales = absmax_scale(largest(peaks), 8)
    return quantize(rows, scales, 0.0, -highest(8), highest(8)), scales
