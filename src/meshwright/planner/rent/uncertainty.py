"""How far a bill may be off: the planner's ranges (planner/step/error_ranges.py) as one deviation, and its digits in
print.

Errors are standard deviations of the logarithm.
"""

from math import erf, log, sqrt

from meshwright.planner.rent.failures import DAY_S
from meshwright.planner.step.error_ranges import relative_range
from meshwright.planner.step.prediction import Prediction

WIDTH = 2 * 1.6449
"""Deviations of a normal distribution between the ends of a range that nine of ten lie in."""


def time_error(found: Prediction) -> float:
    """Of its step time."""
    low, high, _ = relative_range(found.plan, found.stack)
    return log(high / low) / WIDTH


def middle(found: Prediction) -> float:
    """Measured over predicted, in the middle of its range: the ends of what is printed are the planner's."""
    low, high, _ = relative_range(found.plan, found.stack)
    return sqrt(low * high)


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


def plain(value: float, error: float) -> str:
    """The same in print."""
    value = rounded(value, error)
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


def three(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def days(seconds: float, error: float = 0.0) -> str:
    """A time to what is known of it: 16 d, 7.2 h, 12 min."""
    for unit, size in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{plain(seconds / size, error)} {unit}"
    return f"{plain(seconds, error)} s"


def dollars(usd: float, error: float) -> str:
    """A bill to what is known of it."""
    value = rounded(usd, error)
    return f"${plain(value / 1e6, error)}M" if value >= 1e6 else f"${plain(value, error)}"
