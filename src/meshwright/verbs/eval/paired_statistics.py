"""Noise of a figure over items, and of the difference of two models on the same items.

The standard error of a mean is s / sqrt(n), with s the standard deviation of the items (n - 1). Of two models on the
same items it is that of the differences by item: what makes an item hard for both cancels. A ratio of sums (loss of a
token) has the error of its linearization (Cochran 1977, Sampling Techniques, eq. 6.13). Any other figure has that of a
bootstrap over items (Efron 1979) with a fixed seed. Items are assumed independent.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

DRAWS: Final = 1000
DRAWS_OF_TEXTS: Final = 100
"""Draws where an item is texts, whose figure (BLEU) is slow; as in lm_eval."""
FEWEST: Final = 5
"""Number of items below which noise is not judged."""
_TWO_SIDED_95: Final = 1.959964
_SMALL: Final = 1e-12

Kind = Literal["mean", "ratio", "other"]
Verdict = Literal["better", "worse", "within noise", "too few items", "changed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and its standard error."""

    value: float
    error: float | None
    """Standard error. None = a single item, or not available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """Rule that turns items into a figure."""

    kind: Kind
    """mean: of numbers. ratio: of sums, items are (sum, weight). other: result of `combine`."""
    combine: Callable[[Sequence[Any]], float] | None = None

    def compute(self, items: Sequence[Any]) -> float:
        """Return the figure of these items."""
        if self.kind == "other":
            assert self.combine is not None, "another figure says how it is made"
            return float(self.combine(items))
        sums = _sums(items, self.kind)
        return float(sums[:, 0].sum() / sums[:, 1].sum())


def estimate(items: Sequence[Any], figure: Aggregate) -> Estimate:
    """Return the figure with its standard error."""
    value = figure.compute(items)
    if figure.kind == "other":
        return Estimate(value=value, error=_spread([figure.compute(draw) for draw in _resample(items)]))
    return Estimate(value=value, error=_linear_error(_sums(items, figure.kind)))


def difference(before: Sequence[Any], after: Sequence[Any], figure: Aggregate) -> Estimate:
    """Return after - before on the same items, in the same order."""
    mean_change = figure.compute(after) - figure.compute(before)
    if figure.kind == "other":
        pairs = _resample(list(zip(before, after, strict=True)))
        drawn = [figure.compute([b for _, b in draw]) - figure.compute([a for a, _ in draw]) for draw in pairs]
        return Estimate(value=mean_change, error=_spread(drawn))
    first, second = _sums(before, figure.kind), _sums(after, figure.kind)
    # Weights are tokens of the same items, hence equal for both models.
    changes = np.stack((second[:, 0] - first[:, 0], first[:, 1]), axis=1)
    return Estimate(value=mean_change, error=_linear_error(changes))


def weighted_mean(estimates: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """Return the weighted mean of independent figures."""
    total_weight = sum(weights)
    shares = [weight / total_weight for weight in weights]
    errors = [figure.error for figure in estimates]
    known_errors = [error for error in errors if error is not None]
    return Estimate(
        value=sum(share * figure.value for share, figure in zip(shares, estimates, strict=True)),
        error=math.hypot(*map(operator.mul, shares, known_errors)) if len(known_errors) == len(errors) else None,
    )


def verdict(change: Estimate, items: int, higher_is_better: bool | None) -> Verdict:
    """Judge a difference: beyond noise means outside its two-sided 95 % interval (Student's t)."""
    if items < FEWEST or change.error is None:
        return "too few items"
    # _SMALL covers rounding where both models agree on every item and the error is 0.
    if abs(change.value) <= max(critical(items - 1) * change.error, _SMALL):
        return "within noise"
    if higher_is_better is None:
        return "changed"
    return "better" if (change.value > 0) == higher_is_better else "worse"


def critical(freedom: int) -> float:
    """Return Student's t at 97.5 %, by the expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5); 0.3 % off at 4."""
    z = _TWO_SIDED_95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _sums(items: Sequence[Any], kind: Kind) -> NDArray[np.float64]:
    """Return (n, 2): sum and weight of each item."""
    if kind == "ratio":
        return np.array([(float(number), float(weight)) for number, weight in items])
    return np.array([(float(number), 1.0) for number in items])


def _linear_error(sums: NDArray[np.float64]) -> float | None:
    """Return the standard error of the first column's sum over the second's."""
    count, weight = len(sums), sums[:, 1].sum()
    if count < 2 or not weight:
        return None
    rest = sums[:, 0] - sums[:, 0].sum() / weight * sums[:, 1]
    return float(math.sqrt(count / (count - 1) * (rest**2).sum()) / weight)


def _resample(items: Sequence[Any]) -> list[list[Any]]:
    """Return items drawn with replacement, many times."""
    if len(items) < 2:
        return []
    draws = DRAWS_OF_TEXTS if "str" in {type(part).__name__ for part in _flat(items[0])} else DRAWS
    # A fixed seed: the same figures must give the same verdict on every run.
    indices = np.random.default_rng(0).integers(len(items), size=(draws, len(items)))
    return [[items[at] for at in row] for row in indices.tolist()]


def _flat(item: Any) -> list[Any]:
    return [part for element in item for part in _flat(element)] if isinstance(item, list | tuple) else [item]


def _spread(values: Sequence[float]) -> float | None:
    finite_values = [value for value in values if math.isfinite(value)]
    return float(np.std(finite_values, ddof=1)) if len(finite_values) > 1 else None
