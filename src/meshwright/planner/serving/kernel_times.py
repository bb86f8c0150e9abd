"""Interface of the kernel times of which those of a served layer are made."""

from typing import Protocol

from meshwright.planner.serving.number_formats import NumberFormat
from meshwright.spec.model.shape import MLAShape


class KernelTimes(Protocol):
    """Seconds of single operations, forward, on an otherwise idle device."""

    def product(self, m: float, k: float, n: float, number_format: NumberFormat, batch: float = 1.0) -> float:
        """Return the time of (m, k) x (k, n) with weights in a format, `batch` times."""

    def moved(self, size_bytes: float) -> float:
        """Return the time of reading and writing so many bytes."""

    def prefill(self, sequence: float, start: float, heads: float, kv_heads: float, dim: float) -> float:
        """Return the time of causal attention of one sequence's tokens `start` to `sequence`."""

    def decode(
        self, batch: float, context: float, heads: float, kv_heads: float, dim: float, cache_width: float
    ) -> float:
        """Return the time of one new token for each of `batch` sequences over `context` cached ones."""

    def latent_decode(self, batch: float, context: float, heads: float, latent: MLAShape, cache_width: float) -> float:
        """Return the time of decoding over latents, which all heads share."""

    def experts(
        self, tokens: float, hidden: float, ffn: float, top_k: float, number: float, tp: float, ep: float,
        number_format: NumberFormat,
    ) -> float:  # fmt: skip
        """Return the time of the routed experts of one rank."""

    def all_reduce(self, size_bytes: float, ranks: int) -> float:
        """Return the time over `ranks` ranks of a node."""

    def exchanged(self, size_bytes: float, ranks: int) -> float:
        """Return the time of one all-to-all of so many bytes of a rank."""
