"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): round columns in turn, and let the remaining ones absorb each error.

    H = mean of x x^T over the inputs;  H + damping mean(diag H) I;  U U^T-factor of its inverse, U upper
    for each column j, largest H_jj first:   e = (w_j - rounded w_j) / U_jj;   w_k -= e U_jk for every k after j

Scales are computed from the whole matrix before any column is rounded (static groups), so the order of columns costs
nothing at inference. Columns are updated in blocks; those of later blocks once per block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.quantized.matrix import nearest_codes, numbers_of
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
    # later columns are updated block by block: one large product instead of a rank-1 update per column
    for start in range(0, size, block):
        end = min(start + block, size)
        errors = torch.empty_like(wide[:, start:end])
        for column in range(start, end):
            weights = wide[:, column]
            grid = step[:, group[column]], None if zero is None else zero[:, group[column]]
            codes[:, column] = rounded = nearest_codes(scheme, weights, *grid)
            # what this column lost, which later ones make up for as far as their inputs go along
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
    # inputs that were always zero say nothing: their columns are kept apart from all others
    dead = diagonal <= 0
    damped[dead, :] = 0.0
    damped[:, dead] = 0.0
    usual = diagonal[~dead].mean() if not bool(dead.all()) else torch.ones((), dtype=gram.dtype, device=gram.device)
    diagonal[dead] = usual
    # the most used inputs first, while most columns are left to absorb their errors
    columns = diagonal.masked_fill(dead, 0.0).argsort(descending=True, stable=True)
    damped = damped[columns][:, columns]
    damping = DAMPING * usual
    # few rows make the products singular; more damping means less correction, but it works
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
