"""Measured rates by size, to be read between the points where somebody measured: a machine's own in place of a model of
it. Where a graphics processor's products follow from tiles and waves, a CPU's follow from measuring them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

from meshwright.planner.cost.work import MemoryPass
from meshwright.planner.kernels.kernel_operations import AttentionCore, Product
from meshwright.planner.kernels.rate_grid import RateGrid


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
