"""The states of parameters that are updated one by one: what AdamW keeps of those whose moments are not fp32, or whose
bf16 weights have no fp32 master (spec/optimizer_states.py, kernels/narrow_states.py); and what Muon keeps of its
matrices, in any format (training/muon.py)."""

from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from meshwright.kernels.narrow_states import narrow_adamw
from meshwright.kernels.triton.narrow_piece import Moment, NarrowPiece, PositionInWhole, UpdateNumbers, code_books
from meshwright.spec.boxes import Box
from meshwright.spec.optimizer_states import WORK_BYTES, MomentFormat

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
ZERO_CODE = {True: 127, False: 0}
"""Place of 0 in the code book, signed and not."""


@dataclass(frozen=True, slots=True)
class Held:
    """Where a rank's piece of a parameter lies, and how its moments are stored."""

    box: Box
    stored: MomentFormat


class NarrowStates:
    """Moments by parameter name, and their update."""

    def __init__(self, held: dict[str, Held], seed: int, device: torch.device, prefer: str = "auto") -> None:
        """`prefer`: one of chooser.PREFERENCES."""
        self.held, self.seed, self.prefer = held, seed, prefer
        self.books = code_books(device)
        self.moments = {name: _moments(one, device) for name, one in held.items()}

    def tensors(self, name: str) -> dict[str, Tensor]:
        """`moment1`, `moment2`, and of 8-bit ones `moment1_scale`, `moment2_scale`, in the sizes of the piece."""
        found: dict[str, Tensor] = {}
        sizes, stored = self.held[name].box.sizes, self.held[name].stored
        for number, moment in enumerate(self.moments[name], start=1):
            found[f"moment{number}.{name}"] = moment.values.view(sizes)
            if moment.scales is not None:
                found[f"moment{number}_scale.{name}"] = moment.scales.view(stored.scale_sizes(sizes))
        return found

    def update(
        self,
        name: str,
        weights: tuple[Tensor, Tensor | None],
        gradient: Tensor,
        step: Tensor,
        numbers: UpdateNumbers,
        most_bytes: int,
    ) -> None:
        """Of one parameter, in place. `weights`: the one that is updated, and its 16-bit copy."""
        if weights[0].numel():
            piece = self.piece(name, weights, step)
            rows = gradient.reshape(piece.weight.shape)
            narrow_adamw(piece, rows, numbers, most_bytes // WORK_BYTES, self.prefer)

    def piece(self, name: str, weights: tuple[Tensor, Tensor | None], step: Tensor) -> NarrowPiece:
        """What is updated of one parameter, which is not empty, as rows."""
        weight, copy = weights
        size = (-1, weight.shape[-1])  # a vector is one row
        return NarrowPiece(
            weight=weight.view(size),
            copy=None if copy is None else copy.view(size),
            moments=self.moments[name],
            step=step,
            books=self.books,
            position=self._position(name),
        )

    def _position(self, name: str) -> PositionInWhole:
        """Random bits go by seed, name and place in the whole tensor: no rank and no layout changes them."""
        box = self.held[name].box
        _, rows, _ = _three(box.sizes)
        _, whole_rows, width = _three(box.whole)
        first, second, column = _three(box.offsets, 0)
        seed = (crc32(name.encode()) + 2654435761 * self.seed) % 2**32
        return PositionInWhole(
            seed=seed, rows=max(1, rows), whole_rows=whole_rows, first=first, second=second, width=width, column=column
        )


def _three(sizes: tuple[int, ...], filled: int = 1) -> tuple[int, int, int]:
    x, y, w = (filled,) * (3 - len(sizes)) + sizes
    return x, y, w


def _moments(one: Held, device: torch.device) -> tuple[Moment, ...]:
    """A mean of the gradient, and for AdamW one of its square, which has no sign."""
    return tuple(_made(one, device, signed) for signed in (True, False)[: one.stored.moments])


def _made(one: Held, device: torch.device, signed: bool) -> Moment:
    """Zeros."""
    stored, sizes = one.stored, one.box.sizes
    width = sizes[-1]
    rows = one.box.numel // width if width else 0
    if stored.dtype != "int8":
        return Moment(torch.zeros((rows, width), dtype=DTYPES[stored.dtype], device=device), None, signed)
    codes = torch.full((rows, width), ZERO_CODE[signed], dtype=torch.uint8, device=device)
    scales = torch.zeros((rows, stored.scale_sizes(sizes)[-1]), device=device)
    return Moment(codes, scales, signed, stored.block)
