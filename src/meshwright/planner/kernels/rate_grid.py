"""Positive values at the points of a grid, read between them."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import product
from math import exp, log

Axis = tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RateGrid:
    """Positive values at every combination of points on one or more increasing axes; the last axis runs fastest."""

    axes: tuple[Axis, ...]
    values: tuple[float, ...]

    def at(self, *where: float) -> float:
        """Along logarithms of places and values, straight lines between the points; the nearest edge outside."""
        sides = [_between(axis, place) for axis, place in zip(self.axes, where, strict=True)]
        found = 0.0
        for corner in product(*sides):
            index, weight = 0, 1.0
            for axis, (point, share) in zip(self.axes, corner, strict=True):
                index, weight = index * len(axis) + point, weight * share
            found += weight * log(self.values[index])
        return exp(found)


def _between(axis: Axis, place: float) -> tuple[tuple[int, float], ...]:
    """The points beside a place, each with its share."""
    if place <= axis[0]:
        return ((0, 1.0),)
    if place >= axis[-1]:
        return ((len(axis) - 1, 1.0),)
    above = bisect_right(axis, place)
    low, high = axis[above - 1], axis[above]
    share = log(place / low) / log(high / low)
    return (above - 1, 1 - share), (above, share)
