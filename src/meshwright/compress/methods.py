"""A matrix and a scheme -> codes and scales, without data; by a calibrated scheme: those of its round-to-nearest."""

import torch
from torch import Tensor

from meshwright.compress import hqq
from meshwright.kernels.quantization import absmax_scale, e4m3_scale, grouped, zero_point_grid
from meshwright.kernels.quantized_matrix import QuantizedMatrix, assembled, nearest
from meshwright.spec.errors import PlanError
from meshwright.spec.quantization_schemes import Scheme


def quantize_matrix(
    name: str, weight: Tensor, scheme: Scheme, columns: Tensor | None = None, kept: torch.dtype = torch.bfloat16
) -> QuantizedMatrix:
    """Of a matrix (N, K) or a stack (X, N, K). `columns` (O,) are not quantized: they stay as they are, in `kept`, and
    are out of the scales. PlanError names a matrix with numbers that are not finite."""
    wide = weight.detach().float()
    check_finite(name, wide)
    own = None
    if columns is not None and len(columns):
        own = weight.detach()[..., columns.long()].to(kept).contiguous()
        wide = wide.index_fill(-1, columns.long(), 0.0)
    scales, zeros = scales_of(wide, scheme)
    codes = nearest(scheme, wide, scales, zeros)
    return assembled(scheme, codes, scales, zeros, None if own is None else columns, own)


def check_finite(name: str, weight: Tensor) -> None:
    """PlanError names a matrix with numbers that are not finite."""
    if not bool(weight.isfinite().all()):
        bad = int((~weight.isfinite()).sum())
        raise PlanError(f"{name} has {bad} weights that are infinite or NaN: such a model cannot be quantized")


def scales_of(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Scales (..., N, groups), in the dtype they are stored in, and zeros of their size, for a finite matrix."""
    runs = grouped(weight, scheme.group)
    if scheme.zeros == "fixed":
        peaks = runs.abs().amax(-1)
        if scheme.codes == "nf4":
            return _stored(peaks, scheme), None
        found = e4m3_scale(peaks) if scheme.codes == "e4m3" else absmax_scale(peaks, scheme.bits)
        return _stored(found, scheme), None
    low = runs.amin(-1)
    scales = _stored(zero_point_grid(low, runs.amax(-1), scheme.bits)[0], scheme)
    wide = scales.float()
    zeros = (-low.clamp(max=0) / wide).clamp(0, 2**scheme.bits - 1)
    if scheme.zeros == "real":
        zeros = hqq.find_zeros(runs, wide, zeros, scheme.bits)
    return scales, zeros.half().float() if scheme.zeros == "real" else zeros.round()


def _stored(scales: Tensor, scheme: Scheme) -> Tensor:
    """As files have them; 1 in place of what would be rounded to 0."""
    found = scales.to(getattr(torch, scheme.scales))
    return torch.where(found == 0, torch.ones_like(found), found)


def relative_error(weight: Tensor, matrix: QuantizedMatrix) -> float:
    """|W - W'| / |W| of the whole; 0 of zeros."""
    wide = weight.detach().float()
    size = float(wide.norm())
    return float((wide - matrix.dequantized()).norm()) / size if size else 0.0
