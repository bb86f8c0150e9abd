"""A matrix and a scheme -> codes and scales, without data; by a calibrated scheme: those of its round-to-nearest. Some
rows at a time, so that what that takes stays small."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import hqq
from meshwright.kernels.doubled_scales import doubled
from meshwright.kernels.quantization import absmax_scale, e4m3_scale, grouped, zero_point_grid
from meshwright.kernels.quantized_matrix import QuantizedMatrix, assembled, nearest
from meshwright.spec.errors import PlanError
from meshwright.spec.quantization_schemes import PIECE, TABLES, Scheme


def quantize_matrix(
    name: str, weight: Tensor, scheme: Scheme, columns: Tensor | None = None, kept: torch.dtype = torch.bfloat16
) -> QuantizedMatrix:
    """Of a matrix (N, K) or a stack (X, N, K). `columns` (O,) are not quantized: they stay as they are, in `kept`, and
    are out of the scales. PlanError names a matrix with numbers that are not finite, or too large for its scales."""
    check_finite(name, weight.detach())
    found = coded(weight, scheme, columns, kept)
    check_scales(name, scheme, found.scales if found.offset is None else found.offset)
    return found


def coded(
    weight: Tensor, scheme: Scheme, columns: Tensor | None = None, kept: torch.dtype = torch.bfloat16
) -> QuantizedMatrix:
    """The same of numbers that are known to be finite; nothing of it waits for the device."""
    some = columns if columns is not None and len(columns) else None
    found = joined([_quantized(part, scheme, some, kept) for part in in_pieces(weight.detach())])
    if scheme.scales == "double":
        found.scales, found.outer, found.offset = doubled(found.scales)
    return replace(found, scheme=scheme)


def _quantized(weight: Tensor, scheme: Scheme, columns: Tensor | None, kept: torch.dtype) -> QuantizedMatrix:
    """Rows (..., R, K) by themselves: none reads another. Scales that will be codes are fp32 still."""
    plain = replace(scheme, scales="float32") if scheme.scales == "double" else scheme
    wide, own = weight.float(), None
    if columns is not None:
        own = weight[..., columns.long()].to(kept).contiguous()
        wide = wide.index_fill(-1, columns.long(), 0.0)
    scales, zeros = scales_of(wide, plain)
    return assembled(plain, nearest(plain, wide, scales, zeros), scales, zeros, columns, own)


def in_pieces(weight: Tensor) -> Sequence[Tensor]:
    """Runs of the rows (..., R, K) of a matrix, or of each of a stack, as many as are rounded at a time."""
    *stack, _, inputs = weight.shape
    found: Sequence[Tensor] = weight.split(max(1, PIECE // (inputs * max(1, prod(stack)))), -2)
    return found


def joined(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Of the rows of one matrix, or of each of a stack."""
    first = parts[0]
    if len(parts) == 1:
        return first
    whole: dict[str, Any] = {
        name: first.columns if name == "columns" else torch.cat([getattr(one, name) for one in parts], -2)
        for name in first.tensors
    }
    return replace(first, **whole)


def check_finite(name: str, weight: Tensor) -> None:
    """PlanError names a matrix with numbers that are not finite."""
    if not bool(weight.isfinite().all()):
        bad = int((~weight.isfinite()).sum())
        raise PlanError(f"{name} cannot be quantized: {bad} of its weights are infinite or NaN")


def check_scales(name: str, scheme: Scheme, scales: Tensor) -> None:
    """PlanError names a matrix whose numbers are beyond what the dtype of scales can say."""
    if not bool(scales.isfinite().all()):
        there = "fp32" if scheme.scales == "double" else scheme.scales
        raise PlanError(
            f"{name} has weights that are too large for scales in {there}: take format=meshwright, or keep it"
        )


def scales_of(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Scales (..., N, groups), in the dtype they are stored in, and zeros of their size, for a finite matrix."""
    runs = grouped(weight, scheme.group)
    scales, zeros = grid_of(extremes(runs, scheme), scheme)
    if scheme.zeros == "real" and zeros is not None:
        return scales, hqq.find_zeros(runs, scales.float(), zeros, scheme.bits).half().float()
    return scales, zeros


def extremes(runs: Tensor, scheme: Scheme) -> Tensor:
    """What scales are made of, for runs (..., N, groups, size): how far numbers are from zero (1, ..., N, groups), or
    how far below and how far above (2, ..., N, groups). None is negative, so that those of several parts of a run are
    the largest of each."""
    if scheme.zeros == "fixed":
        return runs.abs().amax(-1).unsqueeze(0)
    return torch.stack((-runs.amin(-1).clamp(max=0), runs.amax(-1).clamp(min=0)))


def grid_of(found: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Scales, in the dtype they are stored in, and zeros of their size, from extremes. Real zeros are those to begin
    with (kernels/hqq.py). Normal floats of zeros have a scale of 0, as bitsandbytes has it: where scales are codes, 1
    would coarsen those of others."""
    if scheme.zeros == "fixed":
        (peaks,) = found
        if scheme.codes in TABLES:
            return peaks.to(getattr(torch, scheme.scales)), None
        return _stored(e4m3_scale(peaks) if scheme.codes == "e4m3" else absmax_scale(peaks, scheme.bits), scheme), None
    low, high = -found[0], found[1]
    scales = _stored(zero_point_grid(low, high, scheme.bits)[0], scheme)
    zeros = (-low / scales.float()).clamp(0, 2**scheme.bits - 1)
    return scales, zeros if scheme.zeros == "real" else zeros.round()


def _stored(scales: Tensor, scheme: Scheme) -> Tensor:
    """As files have them; 1 in place of what would be rounded to 0."""
    found = scales.to(getattr(torch, scheme.scales))
    return torch.where(found == 0, torch.ones_like(found), found)


def relative_error(weight: Tensor, matrix: QuantizedMatrix) -> float:
    """|W - W'| / |W| of the whole, some rows at a time; 0 of zeros."""
    norms = []
    for some, restored in matrix.restored_rows():
        own = weight.detach()[..., some, :].float()
        norms.append(torch.stack((own.norm(), restored.sub_(own).norm())))
        del own, restored
    size, wrong = torch.stack(norms).norm(dim=0).tolist()
    return float(wrong / size) if size else 0.0
