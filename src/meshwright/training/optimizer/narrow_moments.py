"""Optimizer states of parameters that are updated one at a time.

These are AdamW's states when moments are not fp32, or when bf16 weights have no fp32 master
(spec/weights/boxes.py, kernels/optimizer/adamw.py), and Muon's states of matrices in any format
(training/optimizer/muon.py).
"""

from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from meshwright.kernels.optimizer.adamw import narrow_adamw
from meshwright.kernels.triton.narrow_piece import Moment, NarrowPiece, PositionInWhole, UpdateNumbers, code_books
from meshwright.spec.weights.boxes import WORK_BYTES, Box, MomentFormat

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
ZERO_CODE = {True: 127, False: 0}
"""Index of 0 in the code book, signed and unsigned."""


@dataclass(frozen=True, slots=True)
class Held:
    """A rank's box of a parameter, and the format of its moments."""

    box: Box
    stored: MomentFormat


class NarrowStates:
    """Moments by parameter name, and their update."""

    def __init__(self, held: dict[str, Held], seed: int, device: torch.device, prefer: str = "auto") -> None:
        """Take `prefer` from chooser.PREFERENCES."""
        self.held, self.seed, self.prefer = held, seed, prefer
        self.books = code_books(device)
        self.moments = {name: _zero_moments(piece, device) for name, piece in held.items()}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return `moment1` and `moment2` in the sizes of the piece.

        8-bit moments add `moment1_scale` and `moment2_scale`.
        """
        tensors: dict[str, Tensor] = {}
        sizes, stored = self.held[name].box.sizes, self.held[name].stored
        for number, moment in enumerate(self.moments[name], start=1):
            tensors[f"moment{number}.{name}"] = moment.values.view(sizes)
            if moment.scales is not None:
                tensors[f"moment{number}_scale.{name}"] = moment.scales.view(stored.scale_sizes(sizes))
        return tensors

    def update(
        self,
        name: str,
        weights: tuple[Tensor, Tensor | None],
        gradient: Tensor,
        step: Tensor,
        numbers: UpdateNumbers,
        most_bytes: int,
    ) -> None:
        """Update one parameter in place. `weights`: the updated weight, and its 16-bit copy."""
        if weights[0].numel():
            piece = self.piece(name, weights, step)
            rows = gradient.reshape(piece.weight.shape)
            narrow_adamw(piece, rows, numbers, most_bytes // WORK_BYTES, self.prefer)

    def piece(self, name: str, weights: tuple[Tensor, Tensor | None], step: Tensor) -> NarrowPiece:
        """Return the local part of a non-empty parameter as rows."""
        weight, copy = weights
        size = (-1, weight.shape[-1])  # a vector is one row
        return NarrowPiece(
            weight=weight.view(size),
            copy=None if copy is None else copy.view(size),
            moments=self.moments[name],
            step=step,
            books=self.books,
            position=self._position_in_whole(name),
        )

    def _position_in_whole(self, name: str) -> PositionInWhole:
        """Return the seed and position that random bits depend on: no rank and no layout changes them."""
        box = self.held[name].box
        _, rows, _ = _pad_to_three(box.sizes)
        _, whole_rows, width = _pad_to_three(box.whole)
        first, second, column = _pad_to_three(box.offsets, 0)
        seed = (crc32(name.encode()) + 2654435761 * self.seed) % 2**32
        return PositionInWhole(
            seed=seed, rows=max(1, rows), whole_rows=whole_rows, first=first, second=second, width=width, column=column
        )


def _pad_to_three(sizes: tuple[int, ...], filled: int = 1) -> tuple[int, int, int]:
    x, y, w = (filled,) * (3 - len(sizes)) + sizes
    return x, y, w


def _zero_moments(held: Held, device: torch.device) -> tuple[Moment, ...]:
    stored, sizes = held.stored, held.box.sizes
    width = sizes[-1]
    rows = held.box.numel // width if width else 0

    def zero_moment(signed: bool) -> Moment:
        if stored.dtype != "int8":
            return Moment(torch.zeros((rows, width), dtype=DTYPES[stored.dtype], device=device), None, signed)
        codes = torch.full((rows, width), ZERO_CODE[signed], dtype=torch.uint8, device=device)
        scales = torch.zeros((rows, stored.scale_sizes(sizes)[-1]), device=device)
        return Moment(codes, scales, signed, stored.block)

    # The mean of the gradient is signed; that of its square, which only AdamW has, is not.
    return tuple(zero_moment(signed) for signed in (True, False)[: stored.moments])
