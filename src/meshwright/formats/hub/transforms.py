"""Inverse pairs of functions between our tensors and those of a Hugging Face file that hold the same numbers.

`export` maps ours to theirs, `restore` the other way. Both work on meta tensors, so the sizes of a file's tensors
follow from those of the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.spec.model.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Transform:
    """Pair `export(ours, shape)` and `restore(theirs, rows, shape)`, with rows the sizes of dim 0 of our tensors."""

    export: Callable[[Sequence[Tensor], ModelShape], Sequence[Tensor]]
    restore: Callable[[Sequence[Tensor], Sequence[int], ModelShape], Sequence[Tensor]]


SAME = Transform(export=lambda ours, shape: ours, restore=lambda theirs, rows, shape: theirs)

STACKED = Transform(
    export=lambda ours, shape: ours[0].unbind(0), restore=lambda theirs, rows, shape: [torch.stack(list(theirs))]
)
"""One tensor of ours with a leading dim of experts (X, out, in) <-> X tensors of theirs."""


def _transpose(tensor: Tensor) -> Tensor:
    return tensor.t() if tensor.dim() == 2 else tensor


CONV1D = Transform(
    export=lambda ours, shape: [_transpose(torch.cat(list(ours)))],
    restore=lambda theirs, rows, shape: torch.split(_transpose(theirs[0]), list(rows)),
)
"""GPT-2 stores weights as (in, out), and several projections side by side. Biases likewise."""


def _fuse(ours: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    turned = [ROTARY.export([rows], shape)[0] for rows in ours[:2]] if len(ours) == 3 else list(ours[:2])
    return [torch.cat([*turned, *ours[2:]])]


def _unfuse(theirs: Sequence[Tensor], rows: Sequence[int], shape: ModelShape) -> Sequence[Tensor]:
    parts = list(theirs[0].split(list(rows)))
    return [ROTARY.restore([part], (), shape)[0] for part in parts[:2]] + parts[2:] if len(rows) == 3 else parts


FUSED = Transform(export=_fuse, restore=_unfuse)
"""Rows of several matrices below each other: queries, keys and values, or gate and up (Phi-3)."""
JOINED = (CONV1D, FUSED)
"""Transforms that make one matrix of several."""
TURNED = "are stored transposed or fused"
"""Description of both, in messages of formats that cannot hold them."""


def _regroup(tensor: Tensor, shape: ModelShape, sizes: tuple[int, int]) -> Tensor:
    """Reorder the rows of every head, seen as a table of `sizes`, to the order of the transposed table."""
    if not shape.rope_interleaved:
        return tensor
    return tensor.reshape(-1, *sizes, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2)


ROTARY = Transform(
    export=lambda ours, shape: [_regroup(ours[0], shape, (shape.head_dim // 2, 2))],
    restore=lambda theirs, rows, shape: [_regroup(theirs[0], shape, (2, shape.head_dim // 2))],
)
"""Rows of queries and keys. Where our rotary pairs are neighbours, theirs are halves of the head.

One permutation of the query and key dims leaves attention scores unchanged, so nothing else differs.
"""
