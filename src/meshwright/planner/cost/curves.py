"""Measured rates by size, interpolated between measured points, instead of a model of the device.

A GPU's products follow from tiles and waves. A CPU's are measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

from meshwright.planner.cost.work import MemoryPass
from meshwright.planner.kernels.kernel_operations import AttentionCore, Product
from meshwright.planner.kernels.rate_grid import RateGrid


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceCurves:
    """Rates that a device reaches while all others of its node do the same."""

    products: Mapping[float, RateGrid]
    """Operand width in bytes -> FLOP/s by (m, k, n)."""
    passes: RateGrid
    """Bytes/s by the bytes that a kernel moves."""
    attention: tuple[RateGrid, RateGrid]
    """FLOP/s by (sequence, head dim), forward and backward."""
    update: RateGrid
    """Bytes/s of the optimizer by the bytes that it moves."""

    def product_s(self, work: Product) -> float:
        """Return the seconds of a matrix product. An unmeasured width is timed as the next wider one."""
        wider = [width for width in self.products if width >= work.width]
        rates = self.products[min(wider, default=max(self.products))]
        return work.flop / rates.at(work.m, work.k, work.n)

    def pass_s(self, work: MemoryPass) -> float:
        """Return the seconds of all kernels of a memory pass."""
        return work.moved_bytes / self.passes.at(work.moved_bytes / work.launches) if work.moved_bytes else 0.0

    def attention_s(self, work: AttentionCore) -> float:
        """Return the seconds of an attention core."""
        return work.flop / self.attention[work.backward].at(work.sequence, work.dim)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkCurves:
    """Times of exchanges within a node while its other groups exchange as well."""

    seconds: Mapping[tuple[str, int], RateGrid]
    """(collective, ranks) -> seconds by bytes of the whole tensor."""

    def exchange_s(self, collective: str, size_bytes: float, ranks: int) -> float | None:
        """Return the seconds of one exchange, or None if the collective was not measured.

        Larger tensors extend the last bandwidth. Other group sizes scale the nearest one by the share that travels.
        """
        sizes = [known for name, known in self.seconds if name == collective]
        if not sizes:
            return None
        near = min(sizes, key=lambda known: abs(log(known / ranks)))
        grid = self.seconds[collective, near]
        travels = (ranks - 1) / ranks / ((near - 1) / near)
        return grid.at(size_bytes) * max(1.0, size_bytes / grid.axes[0][-1]) * travels
