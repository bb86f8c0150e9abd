"""Which kernel attends whole causal rows on a GPU in 16 bits: the faster one, by what one H200 measured. The engine
asks here, and the planner has its rates from here.

Documents, windows and parts of rows go through FlashAttention 2, which alone takes the borders of rows.
"""

from typing import NamedTuple


class AttentionRates(NamedTuple):
    """Of one kernel, over the data sheet's peak: what it reaches of long rows with heads of 128, and where it loses."""

    forward: float
    backward: float
    half: float
    """Positions at which it reaches half of that."""
    narrow: float
    """Of the rate, with heads of 64."""


HOPPER = {
    "flash": AttentionRates(0.333, 0.266, 500.0, 1.0),
    "cudnn": AttentionRates(0.626, 0.465, 500.0, 0.86),
}
"""Steps on one H200, torch 2.11, cuDNN 9.19, 2026-11-27. Flash: 1,024 to 32,768 positions. cuDNN: 8,192 positions with
heads of 128 (0.94 and 3.17 ms of a layer of 8B, flash 1.84 and 5.47), and 32,768 with heads of 64."""
MAJORS = (9, 10)
"""Compute capabilities whose cuDNN is taken: Hopper was measured; flash has no kernel of Blackwell's own."""
LEAST_CUDNN = 91900
"""The version that was measured: older ones had errors that torch turned them off for."""
LEAST_POSITIONS = 1024
"""Rows from which on it is taken: shorter ones wait for launches, whichever kernel it is."""
WIDEST = 128
"""Heads up to which it has a backward pass on every version."""


def row_kernel(major: int, *, positions: int, dim: int, equal: bool, dropout: float, deterministic: bool) -> str:
    """`cudnn` or `flash`, for a GPU of compute capability `major`. `equal`: values are as wide as keys. Gradients of
    cuDNN are summed in any order, as flash's are; torch calls only flash deterministic where that is asked for."""
    takes = dim <= WIDEST and dim % 8 == 0 and equal and not dropout and not deterministic
    return "cudnn" if major in MAJORS and takes and positions >= LEAST_POSITIONS else "flash"
