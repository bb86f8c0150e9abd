"""The same for Meshwright's own engine on a machine that `calibrate` measured: rates are read from its curves."""

from dataclasses import dataclass

from meshwright.planner.cost.links import Links
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.work import MemoryPass
from meshwright.planner.kernels.kernel_operations import AttentionCore, Product
from meshwright.planner.serving.number_formats import NumberFormat
from meshwright.spec.shape import MLAShape

GATHERED = 2.0
"""How often keys and values are moved for one read: blocks are gathered into one piece, which attention reads."""


@dataclass(frozen=True, slots=True)
class MeasuredKernels:
    """Of one process."""

    speeds: Speeds
    links: Links

    def product(self, m: float, k: float, n: float, of: NumberFormat, batch: float = 1.0) -> float:
        """As KernelTimes."""
        return self.speeds.seconds(Product(m, k, n, batch, of.computes))

    def moved(self, size_bytes: float) -> float:
        """As KernelTimes; the curve of passes is by the bytes of one."""
        return self.speeds.seconds(MemoryPass(size_bytes, 1))

    def prefill(self, sequence: float, start: float, heads: float, kv_heads: float, dim: float) -> float:
        """As KernelTimes: the rate of the whole sequence, the FLOP of its end."""
        flop = 2.0 * heads * dim * (sequence**2 - start**2)
        return self.speeds.seconds(AttentionCore(flop, sequence=sequence, dim=dim, width=4.0))

    def decode(
        self, batch: float, context: float, heads: float, kv_heads: float, dim: float, cache_width: float
    ) -> float:
        """As KernelTimes: bound by the bytes of keys and values."""
        return self.moved(2.0 * batch * context * kv_heads * dim * cache_width * GATHERED)

    def latent_decode(self, batch: float, context: float, heads: float, of: MLAShape, cache_width: float) -> float:
        """As KernelTimes."""
        kept = of.kv_rank + of.rope_dim
        flop = 2.0 * batch * context * heads * (kept + of.kv_rank)
        reading = self.moved(batch * context * kept * cache_width * GATHERED)
        return reading + self.speeds.seconds(AttentionCore(flop, sequence=context, dim=float(kept), width=4.0))

    def experts(
        self, tokens: float, hidden: float, ffn: float, top_k: float, number: float, tp: float, ep: float,
        of: NumberFormat,
    ) -> float:  # fmt: skip
        """As KernelTimes: products of each expert that has tokens, evenly routed."""
        pairs, held = tokens * top_k / ep, number / ep
        active: float = held * (1 - (1 - 1 / held) ** pairs)
        rows, inner = max(1.0, pairs / active), ffn / tp
        return active * (self.product(rows, hidden, 2 * inner, of) + self.product(rows, inner, hidden, of))

    def all_reduce(self, size_bytes: float, ranks: int) -> float:
        """As KernelTimes."""
        return self.links.seconds("all-reduce", size_bytes, ranks)

    def exchanged(self, size_bytes: float, ranks: int) -> float:
        """As KernelTimes."""
        return self.links.seconds("all-to-all", size_bytes, ranks)
