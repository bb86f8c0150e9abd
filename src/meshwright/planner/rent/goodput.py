"""Time of a long run in closed form: steps, saves, failures, restarts, missing nodes, evaluation.

`simulation.py` simulates the same, failure by failure; a test compares the two. Goodput is the share of the time in
which lasting steps are done. Failures are a Poisson process: they come at any time, also during saves and restarts.

    save_s      delta   time that a save takes from training
    restart_s   R       time between a failure and the next step
    mtbf_s      M       mean time between failures of all devices together
    interval_s  tau     work between two saves
"""

from dataclasses import dataclass
from math import exp, expm1, sqrt

from meshwright.planner.rent.failures import HOUR_S, Conditions, Saves, erlang_b

MOST_SPARES = 64
MOST_SHARE = 8
"""Nodes per spare node, at least. One spare is always allowed."""


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


def expected_wall_s(work_s: float, interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the mean time from start to end of a run of `work_s`: M e^(R/M) (e^((tau + delta)/M) - 1) T/tau.

    Daly 2006, eq. 20. Exact for a Poisson process, whole intervals, and a save at the end of each.
    """
    segments = work_s / interval_s
    return mtbf_s * exp(restart_s / mtbf_s) * expm1((interval_s + save_s) / mtbf_s) * segments


BUSY = 0.1
"""Largest share of the time in which a save may be under way: no step time includes its traffic."""


def best_interval(save_s: float, mtbf_s: float, write_s: float, step_s: float, work_s: float) -> float:
    """Return Daly's interval within limits: at least a step, at most the run.

    A shorter one would also leave writing under way for more than BUSY of the time.
    """
    return min(work_s, max(daly(save_s, mtbf_s), write_s / BUSY, step_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTiming:
    """Timing of a long run on its cluster."""

    work_s: float
    """Time of steps and evaluations, undisturbed."""
    steps_s: float
    """Time of the steps alone."""
    start_s: float
    """Time before the first step: ranks start and compile."""
    interval_s: float
    """Work between saves."""
    save_s: float
    write_s: float
    restart_s: float
    """Time from a failure, with a spare at hand, to the first step, including reading the checkpoint."""
    mtbf_s: float
    """Mean time between failures of all devices that train."""
    hardware: float
    repair_s: float
    nodes: int
    spares: int

    @property
    def lost_nodes(self) -> float:
        """Mean number of nodes under repair."""
        return self.hardware * self.repair_s / self.mtbf_s

    @property
    def waiting(self) -> float:
        """Share of the time in which a node is missing: more are under repair than there are spares.

        Nodes fail while all run, and are repaired side by side: Erlang's loss formula with spares + 1 places (A. K.
        Erlang 1917).
        """
        return erlang_b(self.spares + 1, self.lost_nodes)

    @property
    def running_s(self) -> float:
        """Mean time without waits for nodes. Each failure also loses the time of writing a checkpoint."""
        again_s = self.restart_s + self.write_s
        return expected_wall_s(self.work_s, self.interval_s, self.save_s, again_s, self.mtbf_s)

    @property
    def failures(self) -> float:
        """Mean number of failures."""
        return self.running_s / self.mtbf_s

    @property
    def wall_s(self) -> float:
        """Mean time from start to end."""
        return self.start_s + self.running_s / (1 - self.waiting)

    @property
    def goodput(self) -> float:
        """Share of the time in which lasting steps are done."""
        return self.steps_s / self.wall_s


def time_run(
    steps_s: float, step_s: float, devices: int, nodes: int, saves: Saves, conditions: Conditions
) -> RunTiming:
    """Return the timing with the best interval between saves and the cheapest number of spare nodes.

    `steps_s`: time of all its steps. `step_s`: of one of them; no run saves more often.
    """
    work_s = steps_s * (1 + conditions.evaluation)
    mtbf_s = conditions.mtbf_device_hours * HOUR_S / devices
    restart_s = conditions.restart_s + saves.write_s
    interval_s = best_interval(saves.stall_s, mtbf_s, saves.write_s, step_s, work_s)

    def with_spares(spares: int) -> RunTiming:
        return RunTiming(
            work_s=work_s,
            steps_s=steps_s,
            start_s=conditions.restart_s,
            interval_s=interval_s,
            save_s=saves.stall_s,
            write_s=saves.write_s,
            restart_s=restart_s,
            mtbf_s=mtbf_s,
            hardware=conditions.hardware,
            repair_s=conditions.repair_s,
            nodes=nodes,
            spares=spares,
        )

    if conditions.spares is not None:
        return with_spares(conditions.spares)
    most = min(MOST_SPARES, max(1, nodes // MOST_SHARE))
    return min(map(with_spares, range(most + 1)), key=lambda timing: timing.wall_s * (nodes + timing.spares))
