"""The matrix product of a mixture of experts: rows sorted by expert, each run of rows times its expert's matrix."""

import torch
from torch import Tensor

from meshwright.kernels.linear import linear, linear_reference


def expert_linear_reference(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """rows (N, in) sorted by expert, weights (X, out, in), counts: rows per expert, summing to N -> (N, out)."""
    parts = rows.split(counts)
    return torch.cat([linear_reference(part, weight) for part, weight in zip(parts, weights, strict=True)])


def expert_linear(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """As the reference; an expert without rows costs nothing and still gets a gradient of zero."""
    parts = rows.split(counts)
    products = [linear(part, weights[x]) for x, part in enumerate(parts) if len(part)]
    if not products:
        return rows.new_zeros(0, weights.shape[1]) + weights.sum() * 0
    return torch.cat(products)
