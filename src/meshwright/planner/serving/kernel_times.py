"""What the times of a served layer are made of, wherever they come from."""

from typing import Protocol

from meshwright.planner.serving.number_formats import NumberFormat
from meshwright.spec.shape import MLAShape


class KernelTimes(Protocol):
    """Seconds of single operations, forward, on a device that does nothing else."""

    def product(self, m: float, k: float, n: float, of: NumberFormat, batch: float = 1.0) -> float:
        """(m, k) x (k, n) with weights in a format, `batch` times."""

    def moved(self, size_bytes: float) -> float:
        """Of reading and writing so many bytes."""

    def prefill(self, sequence: float, start: float, heads: float, kv_heads: float, dim: float) -> float:
        """Of causal attention of one sequence's tokens `start` to `sequence`."""

    def decode(
        self, batch: float, context: float, heads: float, kv_heads: float, dim: float, cache_width: float
    ) -> float:
        """Of one new token for each of `batch` sequences over `context` cached ones."""

    def latent_decode(self, batch: float, context: float, heads: float, of: MLAShape, cache_width: float) -> float:
        """The same over latents, which all heads share."""

    def experts(
        self, tokens: float, hidden: float, ffn: float, top_k: float, number: float, tp: float, ep: float,
        of: NumberFormat,
    ) -> float:  # fmt: skip
        """Of the routed experts of one rank."""

    def all_reduce(self, size_bytes: float, ranks: int) -> float:
        """Over `ranks` ranks of a node."""

    def exchanged(self, size_bytes: float, ranks: int) -> float:
        """Of one all-to-all of so many bytes of a rank."""
