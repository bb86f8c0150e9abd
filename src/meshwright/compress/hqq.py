"""Half-quadratic quantization (Badri and Shaji 2023, https://mobiusml.github.io/hqq_blog): zeros without data.

    min over Z of |W - S (Q - Z)|_p, p < 1, which forgives a few large errors for many small ones

is split in two: E, the errors that are large, by shrinking; and Z, the mean over each group of Q - (W - E) / S. A few
turns of both, each with a larger penalty. Z is rounded at the end, so that zero stays exact and any format holds it;
of the two whole numbers beside it the one with the smaller |.|_p is taken.
"""

import torch
from torch import Tensor

NORM, PENALTY, GROWTH, TURNS = 0.7, 10.0, 1.01, 20
"""p; the first penalty and its growth per turn; all as published."""


def find_zeros(runs: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Whole zeros (..., groups) for runs (..., groups, size) with scales and first zeros (..., groups), fp32."""
    wide, found, penalty = 1 / scales.unsqueeze(-1), zeros.unsqueeze(-1), PENALTY
    best, least = found, error(runs, scales, zeros, bits).unsqueeze(-1)
    for _ in range(TURNS):
        codes = (runs * wide + found).round().clamp(0, 2**bits - 1)
        large = shrunk(runs - (codes - found) / wide, penalty)
        found = (codes - (runs - large) * wide).mean(-1, keepdim=True)
        penalty *= GROWTH
    for rounded in (found.floor(), found.ceil()):
        whole = rounded.clamp(0, 2**bits - 1)
        now = error(runs, scales, whole.squeeze(-1), bits).unsqueeze(-1)
        best, least = torch.where(now < least, whole, best), torch.minimum(now, least)
    return best.squeeze(-1)


def shrunk(x: Tensor, penalty: float) -> Tensor:
    """What minimizes |e|^p + penalty / 2 (e - x)^2, nearly: x less a step that is the larger the smaller x is."""
    size = x.abs()
    left: Tensor = x.sign() * (size - size.clamp(min=1e-12).pow(NORM - 1) / penalty).clamp(min=0)
    return left


def error(runs: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Sum of |w - S (q - Z)|^p over each run (..., groups)."""
    wide, zero = scales.unsqueeze(-1), zeros.unsqueeze(-1)
    codes = ((runs / wide).round() + zero).clamp(0, 2**bits - 1)
    found: Tensor = (runs - (codes - zero) * wide).abs().pow(NORM).sum(-1)
    return found
