"""A matrix, a scheme and what the matrix reads -> codes and scales."""

import torch
from torch import Tensor

from meshwright.compress import gptq
from meshwright.compress.clipping import clipped_scales
from meshwright.compress.input_statistics import Inputs, InputStatistics
from meshwright.kernels.quantized_linear import quantized_linears_reference
from meshwright.kernels.quantized_matrix import QuantizedMatrix, assembled, nearest
from meshwright.kernels.weight_codes import check_finite, check_scales, scales_of
from meshwright.spec.errors import PlanError
from meshwright.spec.quantization_schemes import Scheme

FEWEST = 4
"""An expert is calibrated if it was given at least one row for so many of its inputs."""


def quantize_calibrated(
    name: str, weight: Tensor, scheme: Scheme, inputs: Inputs | None
) -> tuple[QuantizedMatrix, int]:  # fmt: skip
    """Of a matrix (N, K) or a stack (X, N, K), and how many of a stack had too few rows: these are rounded to nearest,
    as all are without inputs. PlanError names a matrix with numbers that are not finite, or too large for
    its scales."""
    wide = weight.detach().float()
    check_finite(name, wide)
    stack = wide.view(-1, *wide.shape[-2:])
    scales, zeros = scales_of(stack, scheme)
    check_scales(name, scheme, scales)
    parts, found, rare = [], [], 0
    for number, one in enumerate(stack):
        own, zero = scales[number], None if zeros is None else zeros[number]
        seen = inputs.of(number) if inputs else None
        if seen is not None and enough(seen, len(stack), one.shape[1]):
            codes, own = _rounded(name, one, seen.gram, scheme, own, zero)
        else:
            codes, rare = nearest(scheme, one, own, zero), rare + (seen is not None)
        parts.append(codes)
        found.append(own)
    lead = wide.shape[:-2]
    codes, scales = (torch.stack(some).view(*lead, *some[0].shape) for some in (parts, found))
    zeros = None if zeros is None else zeros.view(*lead, *zeros.shape[1:])
    return assembled(scheme, codes, scales, zeros), rare


def output_error(weight: Tensor, matrix: QuantizedMatrix, seen: InputStatistics) -> float:
    """|y - y'|^2 / |y|^2 of a matrix (N, K) on what it reads."""
    wide = weight.detach().float()
    if seen.wanted == "products":
        wrong = wide - matrix.dequantized()
        lost, whole = ((one @ seen.gram * one).sum() for one in (wrong, wide))
    else:
        y = seen.some_rows @ wide.t()
        wrong = y - quantized_linears_reference(seen.some_rows, [matrix], [None])[0]
        lost, whole = wrong.square().sum(), y.square().sum()
    return float(lost / whole) if whole else 0.0


def enough(seen: InputStatistics, number: int, columns: int) -> bool:
    """Whether one of so many matrices was given rows to calibrate on; of a single one the text was checked before."""
    return number == 1 or seen.rows * FEWEST >= columns


def _rounded(
    name: str, weight: Tensor, gram: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of one matrix (N, K)."""
    if scheme.method == "awq":
        scales = clipped_scales(weight, gram, scheme, scales, zeros)
        return nearest(scheme, weight, scales, zeros), scales
    try:
        return gptq.quantize_columns(weight, gram, scheme, scales.float(), zeros), scales
    except ArithmeticError as error:
        raise PlanError(f"{name} cannot be calibrated: {error}; give other text, or take int4-hqq") from error
