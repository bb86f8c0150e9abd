"""Measured rates by size, to be read between the points where somebody measured: a machine's own in place of a model of
it. Where a graphics processor's products follow from tiles and waves, a CPU's follow from measuring them.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import exp, log

from meshwright.planner.cost.work import AttentionCore, MemoryPass, Product

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceCurves:
    """What a device was measured to reach while all others of its node do the same."""

    products: Mapping[float, RateGrid]
    """Bytes of an operand -> FLOP a second by (m, k, n)."""
    passes: RateGrid
    """Bytes a second by the bytes that a kernel moves."""
    attention: tuple[RateGrid, RateGrid]
    """FLOP a second by (sequence, dim of a head), forward and backward."""
    update: RateGrid
    """Bytes a second of the optimizer by the bytes it moves."""

    def product_s(self, work: Product) -> float:
        """Of a matrix product; of operands nobody measured as the next wider ones."""
        wider = [width for width in self.products if width >= work.width]
        rates = self.products[min(wider, default=max(self.products))]
        return work.flop / rates.at(work.m, work.k, work.n)

    def pass_s(self, work: MemoryPass) -> float:
        """Of all its kernels."""
        return work.moved_bytes / self.passes.at(work.moved_bytes / work.launches) if work.moved_bytes else 0.0

    def attention_s(self, work: AttentionCore) -> float:
        """Of an attention core."""
        return work.flop / self.attention[work.backward].at(work.sequence, work.dim)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkCurves:
    """What exchanges of a node's ranks took while its other groups did the same."""

    seconds: Mapping[tuple[str, int], RateGrid]
    """(collective, ranks) -> seconds by bytes of the whole tensor."""

    def exchange_s(self, collective: str, size_bytes: float, ranks: int) -> float | None:
        """Of one exchange; None where nobody measured that collective. Beyond the largest tensor as its bandwidth; of
        other group sizes the nearest one's, by the part that travels."""
        sizes = [known for name, known in self.seconds if name == collective]
        if not sizes:
            return None
        near = min(sizes, key=lambda known: abs(log(known / ranks)))
        grid = self.seconds[collective, near]
        travels = (ranks - 1) / ranks / ((near - 1) / near)
        return grid.at(size_bytes) * max(1.0, size_bytes / grid.axes[0][-1]) * travels
