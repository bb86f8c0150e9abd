"""Kernel times for Meshwright's serving engine on a machine that `calibrate` measured.

Rates of products and attention come from the machine's curves, and times of the engine's own operations from its rows.
"""

from dataclasses import dataclass

from meshwright.planner.cost.exchanges import Links
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.work import MemoryPass
from meshwright.planner.kernels.kernel_operations import AttentionCore, Product
from meshwright.planner.serving.deployment import NumberFormat
from meshwright.planner.serving.engine_rates import EngineRates
from meshwright.spec.model.shape import MLAShape

GATHERED = 2.0
"""Times that keys and values are moved for one read: blocks are gathered into one piece, which attention reads."""


@dataclass(frozen=True, slots=True)
class MeasuredKernels:
    """Kernel times of one process."""

    speeds: Speeds
    links: Links

    def product(self, m: float, k: float, n: float, number_format: NumberFormat, batch: float = 1.0) -> float:
        """Return the time of a product, as KernelTimes."""
        return self.speeds.seconds(Product(m, k, n, batch, number_format.computes))

    def moved(self, size_bytes: float) -> float:
        """Return the time of moving bytes, as KernelTimes. The curve of passes is by the bytes of one."""
        return self.speeds.seconds(MemoryPass(size_bytes, 1))

    def prefill(self, sequence: float, start: float, heads: float, kv_heads: float, dim: float) -> float:
        """Return the time of prefill, as KernelTimes: the rate of the whole sequence, the FLOP of its end."""
        flop = 2.0 * heads * dim * (sequence**2 - start**2)
        return self.speeds.seconds(AttentionCore(flop, sequence=sequence, dim=dim, width=4.0))

    def decode(
        self, batch: float, context: float, heads: float, kv_heads: float, dim: float, cache_width: float
    ) -> float:
        """Return the time of decoding, as KernelTimes. It is bound by the bytes of keys and values."""
        return self.moved(2.0 * batch * context * kv_heads * dim * cache_width * GATHERED)

    def latent_decode(self, batch: float, context: float, heads: float, latent: MLAShape, cache_width: float) -> float:
        """Return the time of decoding over latents, as KernelTimes."""
        width = latent.kv_rank + latent.rope_dim
        flop = 2.0 * batch * context * heads * (width + latent.kv_rank)
        reading = self.moved(batch * context * width * cache_width * GATHERED)
        return reading + self.speeds.seconds(AttentionCore(flop, sequence=context, dim=float(width), width=4.0))

    def experts(
        self, tokens: float, hidden: float, ffn: float, top_k: float, number: float, tp: float, ep: float,
        number_format: NumberFormat,
    ) -> float:  # fmt: skip
        """Return the time of experts, as KernelTimes: products of each expert that has tokens, evenly routed."""
        pairs, held = tokens * top_k / ep, number / ep
        active: float = held * (1 - (1 - 1 / held) ** pairs)
        rows, inner = max(1.0, pairs / active), ffn / tp
        return active * (
            self.product(rows, hidden, 2 * inner, number_format) + self.product(rows, inner, hidden, number_format)
        )

    def all_reduce(self, size_bytes: float, ranks: int) -> float:
        """Return the time of an all-reduce, as KernelTimes."""
        return self.links.seconds("all-reduce", size_bytes, ranks)

    def exchanged(self, size_bytes: float, ranks: int) -> float:
        """Return the time of an all-to-all, as KernelTimes."""
        return self.links.seconds("all-to-all", size_bytes, ranks)


PROBED_BYTES = 34.0
"""Bytes that the planner counts per token, layer and element of the hidden state.
They are those of the model that `token_layer_s` was measured on.
"""


@dataclass(frozen=True, slots=True)
class EngineKernels(MeasuredKernels):
    """Kernel times as MeasuredKernels, with the engine's own rates."""

    rates: EngineRates
    read_bytes: float
    """Bytes of the matrices of a step."""

    def product(self, m: float, k: float, n: float, number_format: NumberFormat, batch: float = 1.0) -> float:
        """Return the time of a product, as KernelTimes."""
        return 2.0 * m * k * n * batch / self.rates.products.at(self.read_bytes, m, k, n)

    def moved(self, size_bytes: float) -> float:
        """Return the time of moving bytes, as KernelTimes."""
        return size_bytes / PROBED_BYTES * self.rates.token_layer_s

    def prefill(self, sequence: float, start: float, heads: float, kv_heads: float, dim: float) -> float:
        """Return the time of prefill, as KernelTimes."""
        flop = 2.0 * heads * dim * (sequence**2 - start**2)
        return flop / self.rates.prompt_flop_per_s

    def decode(
        self, batch: float, context: float, heads: float, kv_heads: float, dim: float, cache_width: float
    ) -> float:
        """Return the time of decoding, as KernelTimes: each query head reads its keys and values."""
        return 2.0 * batch * context * heads * dim * cache_width / self.rates.cached_bytes_per_s
