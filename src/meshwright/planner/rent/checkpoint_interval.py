"""How often to save a run that fails now and then: closed forms, and what they minimize.

Symbols: `save_s` is what a save takes from training (delta), `restart_s` what comes between a failure and the next step
(R), `mtbf_s` the mean time between failures of all devices together (M), `interval_s` the work between two saves (tau).
Failures are a Poisson process: they come at any time, also during saves and restarts.
"""

from math import exp, expm1, sqrt


def young(save_s: float, mtbf_s: float) -> float:
    """Work between saves: sqrt(2 delta M). J. W. Young 1974, "A first order approximation to the optimum checkpoint
    interval", CACM 17 (9). Left out: failures during saves and restarts, and more than one in an interval."""
    return sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Work between saves, higher order: J. T. Daly 2006, "A higher order estimate of the optimum checkpoint interval
    for restart dumps", FGCS 22 (3), eq. 37. It does not depend on the restart."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = sqrt(save_s / (2 * mtbf_s))
    return young(save_s, mtbf_s) * (1 + part / 3 + part * part / 9) - save_s


def expected_wall_s(work_s: float, interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """From start to end of a run that has `work_s` to do: Daly 2006, eq. 20, M e^(R/M) (e^((tau + delta)/M) - 1) T/tau.
    Exact for a Poisson process, whole intervals, and a save at the end of each."""
    segments = work_s / interval_s
    return mtbf_s * exp(restart_s / mtbf_s) * expm1((interval_s + save_s) / mtbf_s) * segments


BUSY = 0.1
"""Share of the time in which a save may be under way, beside training: its traffic is in nobody's step time."""


def best_interval(save_s: float, mtbf_s: float, write_s: float, step_s: float, work_s: float) -> float:
    """Daly's, but no shorter than a step, nor than leaves writing under way for more than BUSY of the time; and no
    longer than the run."""
    return min(work_s, max(daly(save_s, mtbf_s), write_s / BUSY, step_s))
