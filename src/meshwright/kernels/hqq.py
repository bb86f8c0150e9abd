"""Half-quadratic quantization (Badri and Shaji 2023, https://mobiusml.github.io/hqq_blog): zeros without data.

    min over Z of |W - S (Q - Z)|_p, p < 1, which forgives a few large errors for many small ones

is split in two: E, the errors that are large, by shrinking; and Z, the mean over each group of Q - (W - E) / S. A few
turns of both, each with a larger penalty. With weights of the usual size, some hundredths, the published penalty lets
no error be large, and Z is that of least squares. Z is a real number: rounded to a whole one it would be no better than
that of round-to-nearest, and zero itself is then off by less than half a step.
"""

import torch
from torch import Tensor

NORM, PENALTY, GROWTH, TURNS = 0.7, 10.0, 1.01, 20
"""p; the first penalty and its growth per turn; number of turns. All as published."""


def find_zeros(runs: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Return Z (..., groups) for runs (..., groups, size) with scales and first zeros (..., groups), fp32.

    The first zeros are real, too: from rounded ones the turns end at a worse optimum. They stay where scales are so
    small that 1 over them is not finite.
    """
    wide, shifts, penalty = 1 / scales.unsqueeze(-1), zeros.unsqueeze(-1), PENALTY
    for _ in range(TURNS):
        codes = (runs * wide + shifts).round().clamp(0, 2**bits - 1)
        large = shrunk(runs - (codes - shifts) / wide, penalty)
        shifts = (codes - (runs - large) * wide).mean(-1, keepdim=True)
        penalty *= GROWTH
    shifts = shifts.squeeze(-1)
    return torch.where(shifts.isfinite(), shifts, zeros)


def shrunk(x: Tensor, penalty: float) -> Tensor:
    """Return nearly the e that minimizes |e|^p + penalty / 2 (e - x)^2: x less a step, larger for smaller x."""
    size = x.abs()
    shrunken: Tensor = x.sign() * (size - size.clamp(min=1e-12).pow(NORM - 1) / penalty).clamp(min=0)
    return shrunken
