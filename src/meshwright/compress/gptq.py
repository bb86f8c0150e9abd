"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): columns are rounded one after the other, and those that are left take
over the error of each.

    H = mean of x x^T over what the matrix reads;  H + damping mean(diag H) I;  U U^T-factor of its inverse, U upper
    for each column j, largest H_jj first:   e = (w_j - rounded w_j) / U_jj;   w_k -= e U_jk for every k after j

Scales are those of the whole matrix before a column is rounded (static groups), so that the order of columns costs
nothing when the matrix is used. Columns are updated in blocks: those of later blocks once for each block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.quantized_matrix import nearest_codes, numbers_of
from meshwright.spec.quantization_schemes import Scheme

DAMPING = 0.01
"""Of the mean of the diagonal, added to it."""
GROWTH, TURNS = 10.0, 6
"""Of the damping, while the sum has no Cholesky factor."""
COLUMNS = 128
"""Of a block."""


class Order(NamedTuple):
    """In which order columns are rounded, and how much each passes on."""

    columns: Tensor
    """(K,) int64: the order."""
    factor: Tensor
    """U (K, K), upper, of columns in that order."""


def quantize_columns(
    weight: Tensor, gram: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None, block: int = COLUMNS
) -> Tensor:
    """Codes (N, K), one an element, of weight (N, K) for inputs with mean products `gram` (K, K); scales and zeros
    (N, groups). Arithmetic is in gram's dtype. An input that was zero throughout is rounded to nearest."""
    order = ordered(gram)
    group = (order.columns // (scheme.group or weight.shape[1])).tolist()
    wide = weight.detach().to(gram.dtype)[:, order.columns]
    step, zero = scales.to(gram.dtype), None if zeros is None else zeros.to(gram.dtype)
    codes = torch.empty(wide.shape, dtype=torch.uint8 if scheme.packed else torch.int8, device=weight.device)
    size = wide.shape[1]
    for start in range(0, size, block):
        end = min(start + block, size)
        errors = torch.empty_like(wide[:, start:end])
        for column in range(start, end):
            own = wide[:, column]
            at = step[:, group[column]], None if zero is None else zero[:, group[column]]
            codes[:, column] = found = nearest_codes(scheme, own, *at)
            error = (own - numbers_of(scheme, found, *at)) / order.factor[column, column]
            wide[:, column:end] -= error.unsqueeze(1) * order.factor[column, column:end]
            errors[:, column - start] = error
        wide[:, end:] -= errors @ order.factor[start:end, end:]
    return codes[:, order.columns.argsort()].contiguous()


def ordered(gram: Tensor) -> Order:
    """Columns by their diagonal, the largest first, and the upper Cholesky factor of the inverse of what is between
    them. ArithmeticError where no damping makes that positive."""
    found = gram.clone()
    diagonal = found.diagonal()
    dead = diagonal <= 0
    found[dead, :] = 0.0
    found[:, dead] = 0.0
    usual = diagonal[~dead].mean() if not bool(dead.all()) else torch.ones((), dtype=gram.dtype, device=gram.device)
    diagonal[dead] = usual
    columns = diagonal.masked_fill(dead, 0.0).argsort(descending=True, stable=True)
    found = found[columns][:, columns]
    damping = DAMPING * usual
    for _ in range(TURNS):
        found.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(found)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed) and bool(upper.isfinite().all()):
                return Order(columns, upper)
        damping = damping * GROWTH
    raise ArithmeticError("products of inputs are not positive, whatever is added to their diagonal")
