"""What real runs took, fed back into a cluster file: the next plan for this machine starts from them."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.planner.clusterfile import ClusterFile
from meshwright.planner.overheads import fitted
from meshwright.spec.errors import RunError
from meshwright.spec.plan import Plan
from meshwright.train.run import MetricsLog, RunFolder

WARMING = 2
"""First steps of a run, which take longer: memory is new, kernels are chosen."""
FEW = 4
"""Runs of which none can be left out to see how well the others tell it."""


def learned(machine: ClusterFile, runs: Sequence[Path]) -> tuple[ClusterFile, list[tuple[Plan, float]]]:
    """The machine with its overheads fitted to the steps of these runs, and (plan, seconds of a step) of each.

    RunError: no run, or one with too few steps; a run under another number of ranks than a node was measured with
    counts as if on it.
    """
    seen = [(_placed(RunFolder.open(path).plan, machine), seconds_of(path)) for path in runs]
    trust = 1.0 if len(seen) < FEW else None
    found = fitted(machine, [plan for plan, _ in seen], [seconds for _, seconds in seen], trust)
    names = ", ".join(str(path) for path in runs)
    told = {**found.provenance, "learned": f"from the steps of {names}"}
    return replace(found, provenance=told), seen


def seconds_of(run: Path) -> float:
    """The median step of a run, without what it waited for data: as its profile says, else as its metrics do."""
    profile = run / "profile.json"
    if profile.is_file():
        try:
            return float(json.loads(profile.read_bytes())["step_seconds"])
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{profile} is no profile: remove it, or profile again") from None
    steps = [row for row in MetricsLog.read(RunFolder.open(run).metrics) if "kind" not in row]
    taken = [row["step_seconds"] - row.get("data_wait_seconds", 0.0) for row in steps if "step_seconds" in row]
    if len(taken) <= WARMING:
        raise RunError(f"{run} has {len(taken)} steps: it takes {WARMING + 1} or more to learn from a run")
    return statistics.median(taken[WARMING:])


def _placed(plan: Plan, machine: ClusterFile) -> Plan:
    return replace(plan, cluster=machine.cluster(plan.layout.world))
