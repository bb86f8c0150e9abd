"""How far a bill may be off: the planner's ranges (planner/step/error_ranges.py) as one deviation, and its digits.

Errors are standard deviations of the logarithm.
"""

from math import erf, log, sqrt

from meshwright.planner.step.error_ranges import relative_range
from meshwright.planner.step.prediction import Prediction

WIDTH = 2 * 1.6449
"""Deviations of a normal distribution between the ends of a range that nine of ten lie in."""


def time_error(found: Prediction) -> float:
    """Of its step time."""
    low, high, _ = relative_range(found.plan, found.stack)
    return log(high / low) / WIDTH


def below(value: float, limit: float, error: float) -> float:
    """Probability that what was predicted as `value` is at most `limit`."""
    if value <= 0 or limit <= 0:
        return 1.0 if value <= limit else 0.0
    return normal(log(limit / value) / error) if error else float(value <= limit)


def normal(deviations: float) -> float:
    """Of a standard normal variable, the probability of at most that."""
    return 0.5 * (1 + erf(deviations / sqrt(2)))


def digits(error: float) -> int:
    """Significant digits that are worth printing: three below 1 %, two below 30 %, else one."""
    return 3 if error < 0.01 else 2 if error < 0.3 else 1


def rounded(value: float, error: float) -> float:
    """A value to what is known of it."""
    return float(f"{value:.{digits(error)}g}")
