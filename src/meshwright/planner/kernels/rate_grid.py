"""Positive values at the points of a grid, interpolated between them."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import product
from math import exp, log

Axis = tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RateGrid:
    """Positive values at every combination of points on one or more increasing axes. The last axis runs fastest."""

    axes: tuple[Axis, ...]
    values: tuple[float, ...]

    def at(self, *where: float) -> float:
        """Interpolate linearly in the logarithms of coordinates and values. Outside, take the nearest edge."""
        sides = [_between(axis, x) for axis, x in zip(self.axes, where, strict=True)]
        logarithm = 0.0
        for corner in product(*sides):
            index, weight = 0, 1.0
            for axis, (point, share) in zip(self.axes, corner, strict=True):
                index, weight = index * len(axis) + point, weight * share
            logarithm += weight * log(self.values[index])
        return exp(logarithm)


def _between(axis: Axis, x: float) -> tuple[tuple[int, float], ...]:
    """Return the neighbouring points of a coordinate, each with its share."""
    if x <= axis[0]:
        return ((0, 1.0),)
    if x >= axis[-1]:
        return ((len(axis) - 1, 1.0),)
    above = bisect_right(axis, x)
    low, high = axis[above - 1], axis[above]
    share = log(x / low) / log(high / low)
    return (above - 1, 1 - share), (above, share)
