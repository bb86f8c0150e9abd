"""Muon for hidden matrices (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982): momentum, orthogonalized.

    m <- m + (1 - momentum) (g - m)          mean of the gradient, each rank of its piece
    d  = g + momentum (m - g)                Nesterov: one step ahead
    O  = Newton-Schulz(d)                    of the whole matrix, by its owner (spec/memory/matrix_exchange.py)
    w <- w - rate decay w - rate 0.2 sqrt(max(rows, columns)) O

The factor gives an update the root mean square of AdamW's, so AdamW's learning rate and decay carry over (Liu et al.,
eq. 4). Directions travel in the dtype in which they are orthogonalized.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.kernels.optimizer.adamw import orthogonalized, random_bits, read, write, write_weight
from meshwright.kernels.triton.narrow_piece import NarrowPiece
from meshwright.parallel import Engine
from meshwright.parallel.groups.group import Group
from meshwright.parallel.groups.mesh import make_group
from meshwright.spec.memory.matrix_exchange import ExchangeRound, HeldPart, OwnedPart, rounds, stage_ranks
from meshwright.spec.recipe.recipe import Recipe

AT_ONCE = 2**22
"""Elements that are updated together. Temporaries in fp32 take 16 MiB each."""
ADAMW_SIZE = 0.2
"""Approximate root mean square of AdamW's updates (Liu et al. 2025, section 2.2)."""


Size = tuple[int, int]
"""Rows and columns of a matrix."""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Scalars of one update, as fp32 tensors (). See Optimizer.step for `divide_by` and `skip`."""

    divide_by: Tensor
    skip: Tensor
    keep: Tensor
    """0.0 when nothing may change, else 1.0."""
    decayed: Tensor
    """Factor that weight decay applies to a weight."""
    rate: float

    @staticmethod
    def for_step(recipe: Recipe, rate: float, divide_by: Tensor, skip: Tensor) -> "StepNumbers":
        """Compute the scalars once per step instead of once per piece."""
        keep = 1 - skip
        return StepNumbers(divide_by, skip, keep, 1 - rate * recipe.weight_decay * keep, rate)


@dataclass(frozen=True, slots=True)
class MatrixUpdate:
    """One parameter whose matrices are updated."""

    piece: NarrowPiece
    direction: Tensor
    """(R, C), the shape of `piece.weight`."""


class Muon:
    """Optimizer of a rank's parts of matrices, together with the other ranks of its stage."""

    def __init__(self, rounds: Sequence[ExchangeRound], group: Group, recipe: Recipe, device: torch.device) -> None:
        """Take `rounds` from matrix_exchange.rounds, whose peers are indices of `group`."""
        self.rounds, self.group, self.recipe, self.device = rounds, group, recipe, device
        self.dtype = torch.float32 if recipe.precision == "fp32" else torch.bfloat16

    def direction(self, piece: NarrowPiece, gradient: Tensor, numbers: StepNumbers) -> Tensor:
        """Add a gradient to the momentum and return the direction (R, C), which may reuse the gradient's memory."""
        momentum, [moment] = self.recipe.momentum, piece.moments
        gradient = gradient.reshape(piece.weight.shape)
        # The direction overwrites the gradient, except in fp16, whose range is too small for it.
        direction = gradient.bfloat16() if gradient.dtype == torch.float16 else gradient
        for rows in _row_blocks(0, *gradient.shape):
            # A skipped step may have a gradient that is not finite, and 0 x NaN is NaN.
            now = torch.where(numbers.skip > 0, 0.0, gradient[rows].float() / numbers.divide_by)
            mean = read(moment, piece.books, rows).lerp_(now, (1 - momentum) * numbers.keep)
            bits = random_bits(piece, rows, gradient.shape[1])
            direction[rows].copy_(now.lerp_(mean, momentum))
            write(moment, mean, piece.books, rows, bits, numbers.skip)
        return direction

    def update(self, updates: Mapping[str, MatrixUpdate], numbers: StepNumbers) -> None:
        """Update all matrices. Every rank of the stage calls this."""
        for exchange in self.rounds:
            self._run_round(exchange, updates, numbers)

    def _run_round(self, exchange: ExchangeRound, updates: Mapping[str, MatrixUpdate], numbers: StepNumbers) -> None:
        # Nested, so that the input of each stage is freed as soon as its output exists.
        pieces = self._scatter(
            exchange, self._pack_owned(exchange, self._orthogonalize(exchange, self._gather(exchange, updates)))
        )
        for part, rows in _split_flat(exchange.held, pieces):
            self._update_rows(updates[part.matrix.name].piece, part, rows, numbers)

    def _gather(self, exchange: ExchangeRound, updates: Mapping[str, MatrixUpdate]) -> dict[Size, Tensor]:
        """Return the owned matrices of a round by size, (number, rows, columns) each."""
        pieces, slots = self._receive_pieces(exchange, updates), _slots(exchange)
        matrices = {
            size: torch.empty(sum(size == other for other, _ in slots), *size, dtype=self.dtype, device=self.device)
            for size in dict.fromkeys(size for size, _ in slots)
        }
        for part, rows in _split_flat(exchange.gathered, pieces):
            size, slot = slots[part.owned]
            matrices[size][slot][part.piece.slices].copy_(rows)
        return matrices

    def _receive_pieces(self, exchange: ExchangeRound, updates: Mapping[str, MatrixUpdate]) -> Tensor:
        """Return the pieces of the owned matrices, flat, ordered by sender."""
        leaving = self._empty_pieces(exchange.sent)
        for part, rows in _split_flat(exchange.sent, leaving):
            rows.copy_(updates[part.matrix.name].direction[part.start : part.start + part.rows])
        if not exchange.gathers:
            return leaving
        return self.group.all_to_all(
            leaving, self._count_by_rank(exchange.sent), self._count_by_rank(exchange.gathered)
        )

    def _orthogonalize(self, exchange: ExchangeRound, whole: dict[Size, Tensor]) -> list[Tensor]:
        """Orthogonalize the owned matrices, those of one size together."""
        for size in list(whole):
            # pop: the input is freed while the next size is computed.
            whole[size] = orthogonalized(whole.pop(size), self.recipe.epsilon)
        return [whole[size][slot] for size, slot in _slots(exchange)]

    def _pack_owned(self, exchange: ExchangeRound, owned: list[Tensor]) -> Tensor:
        """Return the pieces of the owned matrices, flat, ordered by receiver."""
        leaving = self._empty_pieces(exchange.scattered)
        for part, rows in _split_flat(exchange.scattered, leaving):
            rows.copy_(owned[part.owned][part.piece.slices])
        return leaving

    def _scatter(self, exchange: ExchangeRound, leaving: Tensor) -> Tensor:
        """Return the pieces that this rank updates, flat, ordered by owner."""
        if not exchange.scatters:
            return leaving
        return self.group.all_to_all(
            leaving, self._count_by_rank(exchange.scattered), self._count_by_rank(exchange.held)
        )

    def _update_rows(self, piece: NarrowPiece, part: HeldPart, step: Tensor, numbers: StepNumbers) -> None:
        """Update some rows of a weight by their piece (rows, columns) of the orthogonalized matrix."""
        # The length of an update is AdamW's, so that one learning rate suits both.
        size = numbers.rate * ADAMW_SIZE * sqrt(max(part.matrix.rows, part.matrix.columns))
        for rows in _row_blocks(part.start, part.rows, part.columns):
            wide = piece.weight[rows].float().mul_(numbers.decayed)
            wide.addcmul_(step[rows.start - part.start : rows.stop - part.start], numbers.keep, value=-size)
            write_weight(piece, wide, rows, random_bits(piece, rows, part.columns))

    def _empty_pieces(self, parts: Sequence[HeldPart] | Sequence[OwnedPart]) -> Tensor:
        return torch.empty(sum(part.numel for part in parts), dtype=self.dtype, device=self.device)

    def _count_by_rank(self, parts: Sequence[HeldPart] | Sequence[OwnedPart]) -> list[int]:
        """Return the elements for or from each rank of the group."""
        counts = [0] * self.group.size
        for part in parts:
            counts[part.peer] += part.numel
        return counts


def build_muon(engine: Engine, recipe: Recipe) -> Muon:
    """Build Muon for a laid-out model. Every rank of its stage calls this."""
    mesh, shape = engine.mesh, engine.model.shape
    trained = frozenset(name for name, parameter in engine.parameters.items() if parameter.requires_grad)
    group = make_group("stage", stage_ranks(mesh.layout, mesh.rank), mesh)
    device = next(engine.model.parameters()).device
    return Muon(rounds(shape, mesh.layout, mesh.rank, trained), group, recipe, device)


def _row_blocks(start: int, rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of `rows` rows from `start` on, of about AT_ONCE elements each."""
    count = max(1, AT_ONCE // max(1, columns))
    for first in range(start, start + rows, count):
        yield slice(first, min(start + rows, first + count))


def _slots(exchange: ExchangeRound) -> list[tuple[Size, int]]:
    """Return the size of each owned matrix, and its number among those of that size."""
    seen: Counter[Size] = Counter()
    slots = []
    for matrix in exchange.owned:
        size = matrix.rows, matrix.columns
        slots.append((size, seen[size]))
        seen[size] += 1
    return slots


Part = TypeVar("Part", HeldPart, OwnedPart)


def _split_flat(parts: Sequence[Part], flat: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Yield each part with its (rows, columns) of the flat tensor."""
    start = 0
    for part in parts:
        yield part, flat[start : start + part.numel].view(part.rows, part.columns)
        start += part.numel
