"""Exponential smoothing without a pull towards the starting value."""

import math


class Smoothed:
    """Debiased exponential mean: a plain mean at first, later over about the last 1 / (1 - keep) values.

    Non-finite values are left out, so one bad step does not blank the curve.
    """

    def __init__(self, keep: float = 0.9) -> None:
        self.keep = keep
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        """Add one value and return the mean. nan before the first number."""
        if math.isfinite(value):
            self._sum = self.keep * self._sum + (1 - self.keep) * value
            self._weight = self.keep * self._weight + (1 - self.keep)
        return self.value

    @property
    def value(self) -> float:
        """The current mean."""
        return self._sum / self._weight if self._weight else math.nan
