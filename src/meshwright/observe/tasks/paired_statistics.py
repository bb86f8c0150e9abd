"""Noise of a figure over items, and of the difference of two models on the same items.

The standard error of a mean is s / sqrt(n), s the standard deviation of the items with n - 1. Of two models on the same
items it is that of the differences by item: what makes an item hard for both is in neither. A ratio of sums (loss of
a token) has the error of its linearization (Cochran 1977, Sampling Techniques, eq. 6.13); any other figure that of
a bootstrap over items (Efron 1979) with a fixed seed. Items are taken as independent.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

DRAWS: Final = 1000
"""Of a bootstrap."""
DRAWS_OF_TEXTS: Final = 100
"""The same where an item is texts, whose figure (BLEU) takes long; as lm_eval."""
FEWEST: Final = 5
"""Items below which nothing is said about noise."""
_TWO_SIDED_95: Final = 1.959964
_SMALL: Final = 1e-12

Kind = Literal["mean", "ratio", "other"]
Verdict = Literal["better", "worse", "within noise", "too few items", "changed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and its standard error."""

    value: float
    error: float | None
    """None = one item, or not to be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """How items become a figure."""

    kind: Kind
    """mean: of numbers. ratio: of sums, items are (sum, weight). other: what `combine` says."""
    combine: Callable[[Sequence[Any]], float] | None = None

    def of(self, items: Sequence[Any]) -> float:
        """The figure of these items."""
        if self.kind == "other":
            assert self.combine is not None, "another figure says how it is made"
            return float(self.combine(items))
        sums = _sums(items, self.kind)
        return float(sums[:, 0].sum() / sums[:, 1].sum())


def estimate(items: Sequence[Any], figure: Aggregate) -> Estimate:
    """The figure with its standard error."""
    value = figure.of(items)
    if figure.kind == "other":
        return Estimate(value=value, error=_spread([figure.of(some) for some in _drawn(items)]))
    return Estimate(value=value, error=_linear_error(_sums(items, figure.kind)))


def difference(before: Sequence[Any], after: Sequence[Any], figure: Aggregate) -> Estimate:
    """after - before of the same items, in the same order."""
    value = figure.of(after) - figure.of(before)
    if figure.kind == "other":
        pairs = _drawn(list(zip(before, after, strict=True)))
        drawn = [figure.of([b for _, b in some]) - figure.of([a for a, _ in some]) for some in pairs]
        return Estimate(value=value, error=_spread(drawn))
    first, second = _sums(before, figure.kind), _sums(after, figure.kind)
    changes = np.stack((second[:, 0] - first[:, 0], first[:, 1]), axis=1)
    return Estimate(value=value, error=_linear_error(changes))


def weighted(found: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """The mean of independent figures by weight."""
    whole = sum(weights)
    shares = [weight / whole for weight in weights]
    errors = [one.error for one in found]
    known = [error for error in errors if error is not None]
    return Estimate(
        value=sum(share * one.value for share, one in zip(shares, found, strict=True)),
        error=math.hypot(*map(operator.mul, shares, known)) if len(known) == len(errors) else None,
    )


def verdict(found: Estimate, items: int, higher_is_better: bool | None) -> Verdict:
    """Whether a difference is beyond noise: outside of its two-sided 95 % interval (Student's t)."""
    if items < FEWEST or found.error is None:
        return "too few items"
    if abs(found.value) <= max(critical(items - 1) * found.error, _SMALL):
        return "within noise"
    if higher_is_better is None:
        return "changed"
    return "better" if (found.value > 0) == higher_is_better else "worse"


def critical(freedom: int) -> float:
    """Student's t at 97.5 %, by the expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5); 0.3 % off at 4."""
    z = _TWO_SIDED_95
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _sums(items: Sequence[Any], kind: Kind) -> NDArray[np.float64]:
    """(n, 2): sum and weight of each item."""
    if kind == "ratio":
        return np.array([(float(one), float(weight)) for one, weight in items])
    return np.array([(float(one), 1.0) for one in items])


def _linear_error(sums: NDArray[np.float64]) -> float | None:
    """Of the sum of the first column over that of the second."""
    count, weight = len(sums), sums[:, 1].sum()
    if count < 2 or not weight:
        return None
    rest = sums[:, 0] - sums[:, 0].sum() / weight * sums[:, 1]
    return float(math.sqrt(count / (count - 1) * (rest**2).sum()) / weight)


def _drawn(items: Sequence[Any]) -> list[list[Any]]:
    """Items drawn with replacement, many times."""
    if len(items) < 2:
        return []
    draws = DRAWS_OF_TEXTS if "str" in {type(part).__name__ for part in _flat(items[0])} else DRAWS
    chosen = np.random.default_rng(0).integers(len(items), size=(draws, len(items)))
    return [[items[at] for at in row] for row in chosen.tolist()]


def _flat(item: Any) -> list[Any]:
    return [part for one in item for part in _flat(one)] if isinstance(item, list | tuple) else [item]


def _spread(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return float(np.std(known, ddof=1)) if len(known) > 1 else None
