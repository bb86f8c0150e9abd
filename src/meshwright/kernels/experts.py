"""The matrix product of a mixture of experts: rows sorted by expert, each run of rows times its expert's matrix."""

import torch
from torch import Tensor

from meshwright.kernels.linear import linear, linear_reference


def expert_linear_reference(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """rows (N, in) sorted by expert, weights (X, out, in), counts: rows per expert, summing to N -> (N, out)."""
    parts = rows.split(counts)
    return torch.cat([linear_reference(part, weight) for part, weight in zip(parts, weights, strict=True)])


def expert_linear(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """As the reference; an expert without rows costs nothing and still gets a gradient of zero.

    The stack is unbound, not indexed: the gradients are then stacked once, while each index would fill a whole stack.
    """
    parts = zip(rows.split(counts), weights.unbind(), strict=True)
    products = [linear(part, weight) for part, weight in parts if len(part)]
    return torch.cat(products) if products else linear(rows, weights[0])
