"""How far a prediction may be off: the one place where a relative error is asked for.

Errors are standard deviations of the logarithm. They are those of whole tables of published runs (docs/accuracy.md),
not of one software or size: what knows more of a prediction replaces `time_error` and `memory_error`, and nothing else.
"""

from math import erf, log, pi, sqrt

from meshwright.planner.step.prediction import Prediction, usable_bytes

MEAN_TIME_ERROR = 0.108
"""Mean |predicted / measured - 1| of step times on runs that nobody had looked at."""
MEAN_MEMORY_ERROR = 0.076
"""The same of peaks (docs/accuracy.md, Ultra-Scale grid)."""
UNMEASURED = 2.0
"""Times as much where nobody published a measured matrix product of the device: a judgement, not a measurement."""
TO_DEVIATION = sqrt(pi / 2)
"""Standard deviation over mean absolute value, of a normal distribution."""


def time_error(found: Prediction) -> float:
    """Of its step time."""
    device = found.plan.cluster.device
    return MEAN_TIME_ERROR * TO_DEVIATION * (1.0 if device.bf16_matmul_flop_per_s else UNMEASURED)


def memory_error(found: Prediction) -> float:
    """Of its peak."""
    return MEAN_MEMORY_ERROR * TO_DEVIATION


def below(value: float, limit: float, error: float) -> float:
    """Probability that what was predicted as `value` is at most `limit`."""
    if value <= 0 or limit <= 0:
        return 1.0 if value <= limit else 0.0
    return normal(log(limit / value) / error) if error else float(value <= limit)


def normal(deviations: float) -> float:
    """Of a standard normal variable, the probability of at most that."""
    return 0.5 * (1 + erf(deviations / sqrt(2)))


def fits(found: Prediction) -> float:
    """Probability that a layout fits into what a program can have of a device."""
    return below(found.peak_bytes, usable_bytes(found.plan), memory_error(found))


def digits(error: float) -> int:
    """Significant digits that are worth printing: three below 1 %, two below 30 %, else one."""
    return 3 if error < 0.01 else 2 if error < 0.3 else 1


def rounded(value: float, error: float) -> float:
    """A value to what is known of it."""
    return float(f"{value:.{digits(error)}g}")
