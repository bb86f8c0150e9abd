"""Quantization of one matrix by a scheme, with statistics of its inputs if the scheme uses them.

GPTQ (Frantar et al. 2022, arXiv:2210.17323) rounds columns in turn, and lets the remaining ones absorb each error:

    H = mean of x x^T over the inputs;  H + damping mean(diag H) I;  U U^T-factor of its inverse, U upper
    for each column j, largest H_jj first:   e = (w_j - rounded w_j) / U_jj;   w_k -= e U_jk for every k after j

Scales are computed from the whole matrix before any column is rounded (static groups), so the order of columns costs
nothing at inference. Columns are updated in blocks; those of later blocks once per block.

Clipping, the second half of AWQ (arXiv:2306.00978, section 3.2 and its code), multiplies the range of each row and
group by shares of at most 1. The share with the smallest (W' - W) H (W' - W)^T is taken, where W' are the rounded
weights and H the mean products of the group's inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.compress.layer_inputs import Inputs, InputStatistics
from meshwright.kernels.quantized.matrix import QuantizedMatrix, assembled, nearest, nearest_codes, numbers_of
from meshwright.kernels.quantized.quantize import check_finite, check_scales, scales_of
from meshwright.kernels.quantized.quantized_linear import quantized_linears_reference
from meshwright.kernels.quantized.rounding import grouped
from meshwright.spec.errors import PlanError
from meshwright.spec.model.quantization_schemes import Scheme

DAMPING = 0.01
"""Share of the diagonal's mean that is added to the diagonal."""
GROWTH, TURNS = 10.0, 6
"""Factor on the damping while no Cholesky factor exists, and number of attempts."""
COLUMNS = 128
"""Columns per block."""


class Order(NamedTuple):
    """Order in which columns are rounded, and the factor by which errors spread."""

    columns: Tensor
    """Column indices in rounding order (K,) int64."""
    factor: Tensor
    """Upper factor U (K, K), in rounding order."""


def quantize_columns(
    weight: Tensor, gram: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None, block: int = COLUMNS
) -> Tensor:
    """Return codes (N, K), one per element, of weight (N, K) for inputs with mean products `gram` (K, K).

    Scales and zeros are (N, groups). Arithmetic is in gram's dtype. Columns whose input is always zero are rounded to
    nearest.
    """
    order = order_columns(gram)
    group = (order.columns // (scheme.group or weight.shape[1])).tolist()
    wide = weight.detach().to(gram.dtype)[:, order.columns]
    step, zero = scales.to(gram.dtype), None if zeros is None else zeros.to(gram.dtype)
    codes = torch.empty(wide.shape, dtype=torch.uint8 if scheme.packed else torch.int8, device=weight.device)
    size = wide.shape[1]
    # Later columns are updated block by block: one large product instead of a rank-1 update per column.
    for start in range(0, size, block):
        end = min(start + block, size)
        errors = torch.empty_like(wide[:, start:end])
        for column in range(start, end):
            weights = wide[:, column]
            grid = step[:, group[column]], None if zero is None else zero[:, group[column]]
            codes[:, column] = rounded = nearest_codes(scheme, weights, *grid)
            # What this column lost, which later ones make up for as far as their inputs go along.
            error = (weights - numbers_of(scheme, rounded, *grid)) / order.factor[column, column]
            wide[:, column:end] -= error.unsqueeze(1) * order.factor[column, column:end]
            errors[:, column - start] = error
        wide[:, end:] -= errors @ order.factor[start:end, end:]
    return codes[:, order.columns.argsort()].contiguous()


def order_columns(gram: Tensor) -> Order:
    """Sort columns by falling diagonal, and return the upper Cholesky factor of the inverse in that order.

    Raises ArithmeticError when no damping makes the matrix positive definite.
    """
    damped = gram.clone()
    diagonal = damped.diagonal()
    # Inputs that were always zero say nothing: their columns are kept apart from all others.
    dead = diagonal <= 0
    damped[dead, :] = 0.0
    damped[:, dead] = 0.0
    usual = diagonal[~dead].mean() if not bool(dead.all()) else torch.ones((), dtype=gram.dtype, device=gram.device)
    diagonal[dead] = usual
    # The most used inputs first, while most columns are left to absorb their errors.
    columns = diagonal.masked_fill(dead, 0.0).argsort(descending=True, stable=True)
    damped = damped[columns][:, columns]
    damping = DAMPING * usual
    # Few rows make the products singular. More damping means less correction, but it works.
    for _ in range(TURNS):
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed) and bool(upper.isfinite().all()):
                return Order(columns, upper)
        damping = damping * GROWTH
    raise ArithmeticError(
        "the calibration inputs cannot be used: their products are not positive definite. Give a longer "
        "or more varied text"
    )


LEAST, SHARES = 0.7, 12
"""Smallest share of a range to try, and number of shares."""


def clipped_scales(weight: Tensor, gram: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return scales (N, groups) for weight (N, K), at most as large as the given ones. Zero points do not change."""
    runs, wide = grouped(weight.float(), scheme.group), scales.float()
    products = group_products(gram, scheme.group or weight.shape[1])
    zero = None if zeros is None else zeros.float().unsqueeze(-1)
    best = torch.full_like(wide, torch.inf)
    clipped = scales
    for step_number in range(SHARES):
        share = 1 - (1 - LEAST) * step_number / SHARES
        tried = (wide * share).to(scales.dtype)
        step = tried.float().unsqueeze(-1)
        codes = nearest_codes(scheme, runs, step, zero)
        wrong = numbers_of(scheme, codes, step, zero) - runs
        # The error of the outputs, by the inputs' products within a group. Between groups it is ignored.
        error = torch.einsum("ngk,gkl,ngl->ng", wrong, products, wrong)
        # A share so small that its scale is zero in 16 bits is no choice.
        better = (error < best) & (tried != 0)
        best = torch.where(better, error, best)
        clipped = torch.where(better, tried, clipped)
    return clipped


def group_products(gram: Tensor, size: int) -> Tensor:
    """Return the diagonal blocks (groups, size, size) of gram (K, K). The last is padded with zeros."""
    missing = -len(gram) % size
    filled = torch.nn.functional.pad(gram, (0, missing, 0, missing))
    number = len(filled) // size
    blocks = filled.view(number, size, number, size).diagonal(dim1=0, dim2=2)
    return blocks.permute(2, 0, 1).contiguous()


FEWEST = 4
"""Calibrate an expert when it received at least one row per FEWEST input columns."""


def quantize_calibrated(
    name: str, weight: Tensor, scheme: Scheme, inputs: Inputs | None
) -> tuple[QuantizedMatrix, int]:  # fmt: skip
    """Quantize a matrix (N, K) or a stack (X, N, K), and count those of a stack with too few rows.

    These are rounded to nearest, as all are without inputs. Raises PlanError naming a matrix with numbers that are not
    finite or too large for its scales.
    """
    wide = weight.detach().float()
    check_finite(name, wide)
    stack = wide.view(-1, *wide.shape[-2:])
    scales, zeros = scales_of(stack, scheme)
    # Before the long part: infinite weights would fail only after minutes.
    check_scales(name, scheme, scales)
    all_codes, all_scales, rare = [], [], 0
    for number, matrix in enumerate(stack):
        scale, zero = scales[number], None if zeros is None else zeros[number]
        seen = inputs.statistics(number) if inputs else None
        if seen is not None and has_enough_rows(seen, len(stack), matrix.shape[1]):
            codes, scale = _round(name, matrix, seen.gram, scheme, scale, zero)
        else:
            codes, rare = nearest(scheme, matrix, scale, zero), rare + (seen is not None)
        all_codes.append(codes)
        all_scales.append(scale)
    lead = wide.shape[:-2]
    codes, scales = (torch.stack(rows).view(*lead, *rows[0].shape) for rows in (all_codes, all_scales))
    zeros = None if zeros is None else zeros.view(*lead, *zeros.shape[1:])
    return assembled(scheme, codes, scales, zeros), rare


def output_error(weight: Tensor, matrix: QuantizedMatrix, seen: InputStatistics) -> float:
    """Return |y - y'|^2 / |y|^2 of a matrix (N, K) on its inputs."""
    wide = weight.detach().float()
    if seen.wanted == "products":
        wrong = wide - matrix.dequantized()
        lost, whole = ((matrix @ seen.gram * matrix).sum() for matrix in (wrong, wide))
    else:
        y = seen.sampled_rows @ wide.t()
        wrong = y - quantized_linears_reference(seen.sampled_rows, [matrix], [None])[0]
        lost, whole = wrong.square().sum(), y.square().sum()
    return float(lost / whole) if whole else 0.0


def has_enough_rows(seen: InputStatistics, number: int, columns: int) -> bool:
    """Return whether a matrix received enough rows. A single one (`number` 1) did: its text was checked before."""
    return number == 1 or seen.rows * FEWEST >= columns


def _round(
    name: str, weight: Tensor, gram: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of one matrix (N, K)."""
    if scheme.method == "awq":
        scales = clipped_scales(weight, gram, scheme, scales, zeros)
        return nearest(scheme, weight, scales, zeros), scales
    try:
        return quantize_columns(weight, gram, scheme, scales.float(), zeros), scales
    except ArithmeticError as error:
        raise PlanError(f"{name} cannot be calibrated: {error}; give other text, or take int4-hqq") from error
