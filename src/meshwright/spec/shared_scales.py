"""What tensor-parallel ranks find together, so that a part of a matrix is rounded as the whole one (fake_quantize).

A scale belongs to a run of inputs of one row: a group, or all of them. A rank that holds the whole run finds it alone.
Where inputs are cut within runs (W_o, W_down), each finds how far its own numbers reach and the largest of all ranks
count, which is exact. Scales that are codes themselves have a mean of all of the matrix: every rank needs all.

Whole experts, spread over ep, and whatever ZeRO gathers in front of its use, need nothing of this.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from meshwright.spec.boxes import boxes_of
from meshwright.spec.inventory import Parameter, parameters
from meshwright.spec.layout import Layout
from meshwright.spec.quantization_schemes import Scheme
from meshwright.spec.shape import ModelShape


class SharedScales(NamedTuple):
    """Of one matrix, or of a stack of experts."""

    numbers: int = 0
    """Whose largest the ranks take each time it is rounded, in fp32; 0 = each finds its own scales."""
    rows: bool = False
    """Whether each row of activations that it multiplies is cut, too."""
    within_groups: bool = False
    """Whether runs are cut."""


NOTHING = SharedScales()


@lru_cache(maxsize=4096)
def shared_scales(parameter: Parameter, shape: ModelShape, scheme: Scheme, tp: int, ep: int = 1) -> SharedScales:
    """Of a matrix on so many ranks. All of them must say the same: what one of them reads of its own box may be
    whole."""
    if tp == 1 or "tp" not in parameter.axes or (ep > 1 and "ep" in parameter.axes):
        return NOTHING
    boxes = [boxes_of((parameter,), shape, Layout(tp=tp), rank)[parameter.name] for rank in range(tp)]
    *stack, rows, columns = parameter.shape
    by_rows, by_columns = (any(box.sizes[dim] < box.whole[dim] for box in boxes) for dim in (-2, -1))
    within = by_columns and any(box.offsets[-1] % (scheme.group or columns) for box in boxes)
    if not (within or (scheme.scales == "double" and (by_rows or by_columns))):
        return SharedScales(rows=by_columns)
    sides = 1 if scheme.zeros == "fixed" else 2
    return SharedScales(sides * prod(stack) * rows * scheme.groups(columns), by_columns, within)


def rounded_matrices(shape: ModelShape) -> Iterator[Parameter]:
    """One of each kind of matrix that schemes are for, whatever its layer."""
    kinds: dict[tuple[str, tuple[int, ...]], Parameter] = {}
    for one in parameters(shape):
        if one.matrices is not None:
            kinds.setdefault((one.name.removeprefix(f"layers.{one.layer}."), one.shape), one)
    yield from kinds.values()
