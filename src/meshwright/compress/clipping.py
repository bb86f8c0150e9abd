"""Ranges of groups, cut where that makes the error of the outputs smaller: the second half of AWQ
(arXiv:2306.00978, section 3.2 and its code).

Of each row and group the range is multiplied by a share below 1, and the one is taken whose weights W' have the
smallest (W' - W) H (W' - W)^T, H the mean products of the group's own inputs.
"""

import torch
from torch import Tensor

from meshwright.kernels.quantization import grouped
from meshwright.kernels.quantized_matrix import nearest_codes, numbers_of
from meshwright.spec.quantization_schemes import Scheme

LEAST, SHARES = 0.7, 12
"""The least share of a range that is tried, and how many."""


def clipped_scales(
    weight: Tensor, gram: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None
) -> Tensor:  # fmt: skip
    """Scales (N, groups) for weight (N, K), no larger than those given; zeros are codes, and stay."""
    runs, wide = grouped(weight.float(), scheme.group), scales.float()
    own = group_products(gram, scheme.group or weight.shape[1])
    zero = None if zeros is None else zeros.float().unsqueeze(-1)
    best = torch.full_like(wide, torch.inf)
    found = scales
    for place in range(SHARES):
        share = 1 - (1 - LEAST) * place / SHARES
        tried = (wide * share).to(scales.dtype)
        step = tried.float().unsqueeze(-1)
        codes = nearest_codes(scheme, runs, step, zero)
        wrong = numbers_of(scheme, codes, step, zero) - runs
        error = torch.einsum("ngk,gkl,ngl->ng", wrong, own, wrong)
        better = (error < best) & (tried != 0)
        best = torch.where(better, error, best)
        found = torch.where(better, tried, found)
    return found


def group_products(gram: Tensor, size: int) -> Tensor:
    """The blocks (groups, size, size) of gram (K, K) on its diagonal; the last is filled up with zeros."""
    missing = -len(gram) % size
    whole = torch.nn.functional.pad(gram, (0, missing, 0, missing))
    number = len(whole) // size
    blocks = whole.view(number, size, number, size).diagonal(dim1=0, dim2=2)
    return blocks.permute(2, 0, 1).contiguous()
