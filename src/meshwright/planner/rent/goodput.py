"""How much longer a run takes than its steps: saves, failures, restarts, missing nodes, evaluation. In closed form.

`simulation.py` plays the same, failure by failure; a test holds the two together. Goodput is the share of the time in
which steps are done that count.
"""

from dataclasses import dataclass

from meshwright.planner.rent.checkpoint_interval import best_interval, expected_wall_s
from meshwright.planner.rent.failures import HOUR_S, Conditions, Saves, erlang_b

MOST_SPARES = 64
MOST_SHARE = 8
"""A run has at most one spare per so many nodes, and one in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weeks:
    """What a run meets, in the units of its cluster."""

    work_s: float
    """Steps and evaluations, undisturbed."""
    steps_s: float
    """Of that, steps."""
    start_s: float
    """Before the first step: ranks start and compile."""
    interval_s: float
    """Work between saves."""
    save_s: float
    write_s: float
    restart_s: float
    """From a failure with a spare to the first step, the checkpoint read."""
    mtbf_s: float
    """Of all devices that train."""
    hardware: float
    repair_s: float
    nodes: int
    spares: int

    @property
    def lost_nodes(self) -> float:
        """Mean number of nodes that are under repair."""
        return self.hardware * self.repair_s / self.mtbf_s

    @property
    def waiting(self) -> float:
        """Share of the time in which a node is missing: more are under repair than there are spares. Nodes fail while
        all run, and are repaired side by side: Erlang's loss formula with spares + 1 places (A. K. Erlang 1917)."""
        return erlang_b(self.spares + 1, self.lost_nodes)

    @property
    def running_s(self) -> float:
        """Mean, without waits for nodes. A checkpoint counts when it is written: each failure loses that time more."""
        again_s = self.restart_s + self.write_s
        return expected_wall_s(self.work_s, self.interval_s, self.save_s, again_s, self.mtbf_s)

    @property
    def failures(self) -> float:
        """Mean number."""
        return self.running_s / self.mtbf_s

    @property
    def wall_s(self) -> float:
        """Mean, from start to end."""
        return self.start_s + self.running_s / (1 - self.waiting)

    @property
    def goodput(self) -> float:
        """Steps that count, over all."""
        return self.steps_s / self.wall_s


def weeks(steps_s: float, step_s: float, devices: int, nodes: int, saves: Saves, given: Conditions) -> Weeks:
    """A run with the best interval between saves, and the number of spare nodes that makes it cheapest. `steps_s`: all
    its steps, `step_s` one of them: no run saves more often."""
    work_s = steps_s * (1 + given.evaluation)
    mtbf_s = given.mtbf_device_hours * HOUR_S / devices
    restart_s = given.restart_s + saves.write_s
    interval_s = best_interval(saves.stall_s, mtbf_s, saves.write_s, step_s, work_s)

    def found(spares: int) -> Weeks:
        return Weeks(
            work_s=work_s,
            steps_s=steps_s,
            start_s=given.restart_s,
            interval_s=interval_s,
            save_s=saves.stall_s,
            write_s=saves.write_s,
            restart_s=restart_s,
            mtbf_s=mtbf_s,
            hardware=given.hardware,
            repair_s=given.repair_s,
            nodes=nodes,
            spares=spares,
        )

    if given.spares is not None:
        return found(given.spares)
    most = min(MOST_SPARES, max(1, nodes // MOST_SHARE))
    return min(map(found, range(most + 1)), key=lambda one: one.wall_s * (nodes + one.spares))
