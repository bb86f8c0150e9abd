"""Uncertainty of a bill: the planner's ranges (planner/step/error_ranges.py) as one deviation, and printed digits.

Errors are standard deviations of the logarithm.
"""

from math import erf, log, sqrt

from meshwright.planner.rent.failures import DAY_S
from meshwright.planner.step.error_ranges import relative_range
from meshwright.planner.step.prediction import Prediction

WIDTH = 2 * 1.6449
"""Deviations of a normal distribution between the ends of a 90 % range."""


def time_error(prediction: Prediction) -> float:
    """Return the error of a predicted step time."""
    low, high, _ = relative_range(prediction.plan, prediction.stack)
    return log(high / low) / WIDTH


def middle(prediction: Prediction) -> float:
    """Return measured over predicted in the middle of the range: printed ranges are the planner's."""
    low, high, _ = relative_range(prediction.plan, prediction.stack)
    return sqrt(low * high)


def below(value: float, limit: float, error: float) -> float:
    """Return the probability that a quantity predicted as `value` is at most `limit`."""
    if value <= 0 or limit <= 0:
        return 1.0 if value <= limit else 0.0
    return normal(log(limit / value) / error) if error else float(value <= limit)


def normal(deviations: float) -> float:
    """Return the cumulative distribution of a standard normal variable."""
    return 0.5 * (1 + erf(deviations / sqrt(2)))


def digits(error: float) -> int:
    """Return the significant digits worth printing: three below 1 %, two below 30 %, else one."""
    return 3 if error < 0.01 else 2 if error < 0.3 else 1


def rounded(value: float, error: float) -> float:
    """Round a number to its significant digits."""
    return float(f"{value:.{digits(error)}g}")


def plain(value: float, error: float) -> str:
    """Format a number with its significant digits."""
    value = rounded(value, error)
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


def three(value: float) -> str:
    """Format a number with three digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def days(seconds: float, error: float = 0.0) -> str:
    """Format a time with its significant digits: 16 d, 7.2 h, 12 min."""
    for unit, size in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{plain(seconds / size, error)} {unit}"
    return f"{plain(seconds, error)} s"


def dollars(usd: float, error: float) -> str:
    """Format a bill with its significant digits."""
    value = rounded(usd, error)
    return f"${plain(value / 1e6, error)}M" if value >= 1e6 else f"${plain(value, error)}"
