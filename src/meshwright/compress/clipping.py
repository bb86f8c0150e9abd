"""Clipping: narrower ranges of groups where that reduces the error of the outputs.

This is the second half of AWQ (arXiv:2306.00978, section 3.2 and its code). The range of each row and group is
multiplied by shares of at most 1. The share with the smallest (W' - W) H (W' - W)^T is taken, where W' are the rounded
weights and H the mean products of the group's inputs.
"""

import torch
from torch import Tensor

from meshwright.kernels.quantized.matrix import nearest_codes, numbers_of
from meshwright.kernels.quantized.rounding import grouped
from meshwright.spec.model.quantization_schemes import Scheme

LEAST, SHARES = 0.7, 12
"""Smallest share of a range to try, and number of shares."""


def clipped_scales(
    weight: Tensor, gram: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None
) -> Tensor:  # fmt: skip
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
        # the error of the outputs, by the inputs' products within a group; between groups it is ignored
        error = torch.einsum("ngk,gkl,ngl->ng", wrong, products, wrong)
        # a share so small that its scale is zero in 16 bits is no choice
        better = (error < best) & (tried != 0)
        best = torch.where(better, error, best)
        clipped = torch.where(better, tried, clipped)
    return clipped


def group_products(gram: Tensor, size: int) -> Tensor:
    """Return the diagonal blocks (groups, size, size) of gram (K, K). The last is padded with zeros."""
    missing = -len(gram) % size
    whole = torch.nn.functional.pad(gram, (0, missing, 0, missing))
    number = len(whole) // size
    blocks = whole.view(number, size, number, size).diagonal(dim1=0, dim2=2)
    return blocks.permute(2, 0, 1).contiguous()
