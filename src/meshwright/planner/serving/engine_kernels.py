"""Times of operations in Meshwright's serving engine, from measurements of `calibrate`."""

from dataclasses import dataclass

from meshwright.planner.serving.engine_rates import EngineRates
from meshwright.planner.serving.measured_kernels import MeasuredKernels
from meshwright.planner.serving.number_formats import NumberFormat

PROBED_BYTES = 34.0
"""Bytes that layer_times.py counts per token, layer and element of the hidden state.
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
