"""Scales that tensor-parallel ranks find together to round a part of a matrix like the whole one (fake_quantize).

A scale belongs to a run of inputs of one row: a group, or all of them. A rank that holds the whole run finds it alone.
If inputs are cut within runs (W_o, W_down), the ranks take the maximum of their own ranges, which is exact. Scales that
are codes themselves have a mean over the whole matrix, so every rank needs all scales.

Whole experts, spread over ep, and matrices that ZeRO gathers before use need none of this.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.boxes import boxes_of
from meshwright.spec.weights.inventory import Parameter, parameters


class SharedScales(NamedTuple):
    """Scales that ranks find together for one matrix, or for a stack of experts."""

    numbers: int = 0
    """Numbers whose maximum the ranks take each time the matrix is rounded, in fp32. 0 = each finds its own scales."""
    rows: bool = False
    """Rows of the activations that it multiplies are cut, too."""
    within_groups: bool = False
    """Runs of inputs that share a scale are cut."""


NOTHING = SharedScales()


@lru_cache(maxsize=4096)
def shared_scales(parameter: Parameter, shape: ModelShape, scheme: Scheme, tp: int, ep: int = 1) -> SharedScales:
    """Return the scales of a matrix that `tp` ranks find together.

    All ranks must get the same answer, although the box of one of them may be whole.
    """
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
    """Yield one matrix of each kind that schemes apply to, whatever its layer."""
    kinds: dict[tuple[str, tuple[int, ...]], Parameter] = {}
    for parameter in parameters(shape):
        if parameter.matrices is not None:
            kinds.setdefault((parameter.name.removeprefix(f"layers.{parameter.layer}."), parameter.shape), parameter)
    yield from kinds.values()
