"""The gradient noise scale: the useful batch size (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1).

For gradients G_small, G_big of batches of b < B tokens, E|G|^2 = |true|^2 + tr(Sigma)/size. Two sizes give both:
    tr(Sigma) = (|G_small|^2 - |G_big|^2) / (1/b - 1/B)        |true|^2 = |G_big|^2 - tr(Sigma)/B
and the noise scale is tr(Sigma) / |true|^2, in tokens: the critical batch size. The micro-batches of one step are the
small batches, the step is the big one. Both terms are averaged over measurements before dividing, as the paper advises.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

DECAY = 0.9


@dataclass(slots=True)
class NoiseScale:
    """Running averages of tr(Sigma) and |true|^2."""

    variance: float = 0.0
    signal: float = 0.0
    weight: float = 0.0

    def add(self, small_squared: Sequence[float], small_tokens: Sequence[float], big_squared: float) -> None:
        """Add one measurement: squared norms of the mean gradients of each micro-batch and of the whole step.

        Micro-batches without a valid token are ignored. A step with fewer than two others, or whose gradient overflowed
        (fp16), adds nothing.
        """
        small = [(squared, tokens) for squared, tokens in zip(small_squared, small_tokens, strict=True) if tokens]
        mean_squared = sum(squared for squared, _ in small) / max(1, len(small))
        if len(small) < 2 or not math.isfinite(mean_squared + big_squared):
            return
        inverse = sum(1 / tokens for _, tokens in small) / len(small)
        big = sum(tokens for _, tokens in small)
        variance = (mean_squared - big_squared) / (inverse - 1 / big)
        signal = big_squared - variance / big
        self.variance = DECAY * self.variance + (1 - DECAY) * variance
        self.signal = DECAY * self.signal + (1 - DECAY) * signal
        self.weight = DECAY * self.weight + (1 - DECAY)

    @property
    def tokens(self) -> float | None:
        """The noise scale in tokens. None = not measured yet, or noise hides the signal."""
        if self.weight == 0 or self.signal <= 0 or self.variance <= 0:
            return None
        return self.variance / self.signal
