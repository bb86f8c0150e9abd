"""Muon for hidden matrices (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982): momentum, orthogonalized.

    m <- m + (1 - momentum) (g - m)          mean of the gradient, each rank of its piece
    d  = g + momentum (m - g)                Nesterov: one step ahead
    O  = Newton-Schulz(d)                    of the whole matrix, by its owner (spec/matrix_exchange.py)
    w <- w - rate decay w - rate 0.2 sqrt(max(rows, columns)) O

The factor gives an update the size (root mean square) of AdamW's, so that its learning rate and decay carry over
(Liu et al., eq. 4). Directions travel in the dtype in which they are orthogonalized.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.kernels.narrow_states import random_bits, read, write, write_weight
from meshwright.kernels.orthogonalize import orthogonalized
from meshwright.kernels.triton.narrow_piece import NarrowPiece
from meshwright.parallel import Engine
from meshwright.parallel.group import Group
from meshwright.parallel.mesh import make_group
from meshwright.spec.matrix_exchange import ExchangeRound, HeldPart, OwnedPart, rounds, stage_ranks
from meshwright.spec.recipe import Recipe

AT_ONCE = 2**22
"""Elements that are updated together: temporaries in fp32 are 16 MiB each."""
ADAMW_SIZE = 0.2
"""Root mean square of AdamW's updates, about (Liu et al. 2025, section 2.2)."""


Size = tuple[int, int]
"""Rows and columns of a matrix."""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Of one update, as tensors () fp32. `divide_by` and `skip`: as Optimizer.step."""

    divide_by: Tensor
    skip: Tensor
    keep: Tensor
    """0.0 where nothing may change, else 1.0."""
    decayed: Tensor
    """What weight decay leaves of a weight."""
    rate: float

    @staticmethod
    def of(recipe: Recipe, rate: float, divide_by: Tensor, skip: Tensor) -> "StepNumbers":
        """Made once, not for each piece."""
        keep = 1 - skip
        return StepNumbers(divide_by, skip, keep, 1 - rate * recipe.weight_decay * keep, rate)


@dataclass(frozen=True, slots=True)
class MatrixUpdate:
    """One parameter whose matrices are being updated."""

    piece: NarrowPiece
    direction: Tensor
    """(R, C), as `piece.weight`."""


class Muon:
    """Updates what a rank holds of matrices, with the other ranks of its stage."""

    def __init__(self, rounds: Sequence[ExchangeRound], group: Group, recipe: Recipe, device: torch.device) -> None:
        """`rounds`: matrix_exchange.rounds, in places of `group`."""
        self.rounds, self.group, self.recipe, self.device = rounds, group, recipe, device
        self.dtype = torch.float32 if recipe.precision == "fp32" else torch.bfloat16

    def direction(self, piece: NarrowPiece, gradient: Tensor, numbers: StepNumbers) -> Tensor:
        """Count a gradient into the momentum -> the direction (R, C). It takes the gradient's memory; but that of fp16
        has too small a range."""
        momentum, [moment] = self.recipe.momentum, piece.moments
        gradient = gradient.reshape(piece.weight.shape)
        found = gradient.bfloat16() if gradient.dtype == torch.float16 else gradient
        for rows in _runs(0, *gradient.shape):
            now = torch.where(numbers.skip > 0, 0.0, gradient[rows].float() / numbers.divide_by)
            mean = read(moment, piece.books, rows).lerp_(now, (1 - momentum) * numbers.keep)
            bits = random_bits(piece, rows, gradient.shape[1])
            found[rows].copy_(now.lerp_(mean, momentum))
            write(moment, mean, piece.books, rows, bits, numbers.skip)
        return found

    def update(self, some: Mapping[str, MatrixUpdate], numbers: StepNumbers) -> None:
        """All matrices; every rank of the stage calls this."""
        for one in self.rounds:
            self._round(one, some, numbers)

    def _round(self, one: ExchangeRound, some: Mapping[str, MatrixUpdate], numbers: StepNumbers) -> None:
        """Each step's result takes the place of what it was made from."""
        found = self._returned(one, self._leaving(one, self._orthogonalized(one, self._gathered(one, some))))
        for part, rows in _cut(one.held, found):
            self._change(some[part.matrix.name].piece, part, rows, numbers)

    def _gathered(self, one: ExchangeRound, some: Mapping[str, MatrixUpdate]) -> dict[Size, Tensor]:
        """The owned matrices of a round, by size: (number, rows, columns)."""
        pieces, places = self._pieces(one, some), _places(one)
        whole = {
            size: torch.empty(sum(size == of for of, _ in places), *size, dtype=self.dtype, device=self.device)
            for size in dict.fromkeys(size for size, _ in places)
        }
        for part, rows in _cut(one.gathered, pieces):
            size, at = places[part.owned]
            whole[size][at][part.piece.slices].copy_(rows)
        return whole

    def _pieces(self, one: ExchangeRound, some: Mapping[str, MatrixUpdate]) -> Tensor:
        """Of them, flat, by sender."""
        leaving = self._flat(one.sent)
        for part, rows in _cut(one.sent, leaving):
            rows.copy_(some[part.matrix.name].direction[part.start : part.start + part.rows])
        if not one.gathers:
            return leaving
        return self.group.all_to_all(leaving, self._counts(one.sent), self._counts(one.gathered))

    def _orthogonalized(self, one: ExchangeRound, whole: dict[Size, Tensor]) -> list[Tensor]:
        """The owned matrices; those of one size are computed together."""
        for size in list(whole):
            whole[size] = orthogonalized(whole.pop(size), self.recipe.epsilon)
        return [whole[size][at] for size, at in _places(one)]

    def _leaving(self, one: ExchangeRound, owned: list[Tensor]) -> Tensor:
        """Their pieces, flat, by receiver."""
        leaving = self._flat(one.scattered)
        for part, rows in _cut(one.scattered, leaving):
            rows.copy_(owned[part.owned][part.piece.slices])
        return leaving

    def _returned(self, one: ExchangeRound, leaving: Tensor) -> Tensor:
        """The pieces that this rank updates, flat, by owner."""
        if not one.scatters:
            return leaving
        return self.group.all_to_all(leaving, self._counts(one.scattered), self._counts(one.held))

    def _change(self, piece: NarrowPiece, part: HeldPart, step: Tensor, numbers: StepNumbers) -> None:
        """Some rows of a weight, by their piece (rows, columns) of the orthogonalized matrix."""
        size = numbers.rate * ADAMW_SIZE * sqrt(max(part.matrix.rows, part.matrix.columns))
        for rows in _runs(part.start, part.rows, part.columns):
            wide = piece.weight[rows].float().mul_(numbers.decayed)
            wide.addcmul_(step[rows.start - part.start : rows.stop - part.start], numbers.keep, value=-size)
            write_weight(piece, wide, rows, random_bits(piece, rows, part.columns))

    def _flat(self, parts: Sequence[HeldPart] | Sequence[OwnedPart]) -> Tensor:
        return torch.empty(sum(part.numel for part in parts), dtype=self.dtype, device=self.device)

    def _counts(self, parts: Sequence[HeldPart] | Sequence[OwnedPart]) -> list[int]:
        """Elements for or from each rank of the group."""
        found = [0] * self.group.size
        for part in parts:
            found[part.peer] += part.numel
        return found


def muon_of(engine: Engine, recipe: Recipe) -> Muon:
    """For a laid-out model; every rank of its stage calls this."""
    mesh, shape = engine.mesh, engine.model.shape
    trained = frozenset(name for name, parameter in engine.parameters.items() if parameter.requires_grad)
    group = make_group("stage", stage_ranks(mesh.layout, mesh.rank), mesh)
    device = next(engine.model.parameters()).device
    return Muon(rounds(shape, mesh.layout, mesh.rank, trained), group, recipe, device)


def _runs(start: int, rows: int, columns: int) -> Iterator[slice]:
    """Slices of `rows` rows from `start` on, of about AT_ONCE elements each."""
    each = max(1, AT_ONCE // max(1, columns))
    for first in range(start, start + rows, each):
        yield slice(first, min(start + rows, first + each))


def _places(one: ExchangeRound) -> list[tuple[Size, int]]:
    """Of each owned matrix: its size, and its place among those of that size."""
    seen: Counter[Size] = Counter()
    found = []
    for matrix in one.owned:
        size = matrix.rows, matrix.columns
        found.append((size, seen[size]))
        seen[size] += 1
    return found


Part = TypeVar("Part", HeldPart, OwnedPart)


def _cut(parts: Sequence[Part], flat: Tensor) -> Iterator[tuple[Part, Tensor]]:
    """Each part with its (rows, columns) of what lies one after another."""
    place = 0
    for part in parts:
        yield part, flat[place : place + part.numel].view(part.rows, part.columns)
        place += part.numel
