"""Published approximations of the best interval between saves, beside which the exact one is held."""

from math import sqrt


def young(save_s: float, mtbf_s: float) -> float:
    """Return the work between saves by Young: sqrt(2 delta M).

    J. W. Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17 (9). Left out: failures
    during saves and restarts, and more than one in an interval.
    """
    return sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Return the work between saves by Daly, of higher order. It does not depend on the restart.

    J. T. Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (3), eq.
    37.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = sqrt(save_s / (2 * mtbf_s))
    return young(save_s, mtbf_s) * (1 + part / 3 + part * part / 9) - save_s
