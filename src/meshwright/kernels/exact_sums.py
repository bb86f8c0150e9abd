"""Products of a few columns whose bits do not depend on the other rows.

A BLAS library's order of additions depends on the number of rows, and rounded sums depend on the order. Here no sum is
rounded: both operands are first rounded to steps for which products and their sums are whole numbers of 53 bits.

    x   24 bits below a power of two above the row's largest: as exact as fp32 is for that one
    W   20 bits below the same of an output: fp16 has 11, bf16 8
    53 - 24 - 20 = 9 bits are left for the sum: 512 columns
"""

import torch
from torch import Tensor

ROW_BITS, WEIGHT_BITS = 24, 20
AT_ONCE = 2 ** (53 - ROW_BITS - WEIGHT_BITS)
"""Columns whose sum is exact."""


def in_steps(values: Tensor, bits: int) -> Tensor:
    """Round values (M, K) to multiples, in fp64, of 2^-bits of a power of two above each row's largest."""
    wide = values.double()
    exponents = torch.frexp(wide.abs().amax(1, keepdim=True)).exponent
    return torch.ldexp(torch.ldexp(wide, bits - exponents).round_(), exponents - bits)


def weights_in_steps(weights: Tensor) -> Tensor:
    """Prepare weights (N, K), where K may be 0, for `exact_product`: (K, N) fp64."""
    return in_steps(weights, WEIGHT_BITS).t().contiguous() if weights.shape[1] else weights.double().t()


def exact_product(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply x (M, K) by `weights_in_steps` (K, N). Returns (M, N) fp32."""
    if not len(weights):
        return x.new_zeros(len(x), weights.shape[1], dtype=torch.float32)
    rows = in_steps(x, ROW_BITS)
    total = rows[:, :AT_ONCE] @ weights[:AT_ONCE]
    for start in range(AT_ONCE, len(weights), AT_ONCE):
        total += rows[:, start : start + AT_ONCE] @ weights[start : start + AT_ONCE]
    return total.float()
