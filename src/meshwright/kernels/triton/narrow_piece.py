"""Inputs for an update of narrow optimizer states (kernels.optimizer.adamw): pieces, positions, numbers, code books.

This module needs no Triton.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Moment:
    """Moment of a parameter's piece, as rows. `values` (R, W) fp32, bf16, or uint8 with `scales` (R, W / block)."""

    values: Tensor
    scales: Tensor | None
    signed: bool
    block: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionInWhole:
    """Position of a piece in its whole tensor (X, Y, W), and the seed of the parameter's random bits.

    Row r of the piece is row ((r // rows) + first) * whole_rows + r % rows + second of the whole.
    """

    seed: int
    rows: int
    whole_rows: int
    first: int
    second: int
    width: int
    """Width of a whole row."""
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowPiece:
    """Rows (R, W) of one parameter, which are updated together."""

    weight: Tensor
    """fp32: updated as it is. bf16: rounded stochastically."""
    copy: Tensor | None
    """The 16-bit weight of an fp32 master, written from it."""
    moments: tuple[Moment, ...]
    """AdamW's two, or Muon's one."""
    step: Tensor
    """Updates so far, this one included, () fp32."""
    books: Tensor
    """Result of `code_books`."""
    position: PositionInWhole


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateNumbers:
    """Numbers of one update. `divide_by` and `skip` () fp32: as in Optimizer.step."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    decay: float
    divide_by: Tensor
    skip: Tensor


def code_books(device: torch.device) -> Tensor:
    """Return code books (4, 256) fp32: signed numbers ascending, the middles between them, the same unsigned.

    The last middle is infinite.
    """
    rows = []
    for signed in (True, False):
        numbers = code_book(signed)
        rows += [numbers, [(a + b) / 2 for a, b in pairwise(numbers)] + [float("inf")]]
    return torch.tensor(rows, device=device)


def code_book(signed: bool) -> list[float]:
    """Return the numbers of dynamic exponent quantization.

    These are 0, 1, and for each power of ten from 1e-6 to 1 equal steps between 0.1 and 1 of it, twice as many for each
    next power. Both signs, or one sign and twice as many again.
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        steps = 2**exponent * (1 if signed else 2)
        middles = [10.0 ** (exponent - 6) * (0.1 + 0.9 * (at + 0.5) / steps) for at in range(steps)]
        numbers += middles + [-middle for middle in middles if signed]
    return sorted(numbers)
