"""What real runs took, fed back into a cluster file: the next plan for this machine starts from them."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.observe.compare.finished_run import PROFILE, Finished, open_run, same_program
from meshwright.observe.shared_document import SharedDocument
from meshwright.planner.machine.clusterfile import ClusterFile
from meshwright.planner.machine.overheads import fitted
from meshwright.spec.errors import RunError
from meshwright.spec.plan import Plan

WARMING = 2
"""First steps of a run, which take longer: memory is new, kernels are chosen."""
FEW = 4
"""Runs of which none can be left out to see how well the others tell it."""


def learned(machine: ClusterFile, runs: Sequence[Path]) -> tuple[ClusterFile, list[tuple[Plan, float]]]:
    """The machine with its overheads fitted to the steps of these runs, and (plan, seconds of a step) of each.

    RunError: no run, a damaged one, one with too few steps, a profile of another plan. A run under another number of
    ranks than a node was measured with counts as if on it.
    """
    finished = [open_run(path) for path in runs]
    seen = [(_placed(run.plan_as_run, machine), seconds_of(run)) for run in finished]
    trust = 1.0 if len(seen) < FEW else None
    found = fitted(machine, [plan for plan, _ in seen], [seconds for _, seconds in seen], trust)
    names = ", ".join(str(path) for path in runs)
    told = {**found.provenance, "learned": f"from the steps of {names}"}
    return replace(found, provenance=told), seen


def seconds_of(run: Finished) -> float:
    """The median step of a run, without what it waited for data: as its profile says, else as its metrics do. RunError:
    a profile of another plan, or without a time; too few steps."""
    if run.profile is not None:
        return _profiled(run, run.profile)
    last = run.plan_as_run.recipe.global_batch
    own = [row for row in run.steps if row.get("global_batch", last) == last]
    taken = [row["step_seconds"] - (row.get("data_wait_seconds") or 0.0) for row in own]
    if len(taken) <= WARMING:
        raise RunError(f"{run.path} has {len(taken)} steps: it takes {WARMING + 1} or more to learn from a run")
    seconds = float(statistics.median(taken[WARMING:]))
    if seconds <= 0:
        raise RunError(f"{run.path / 'metrics.jsonl'} is of another program: its steps took no time")
    return seconds


def _profiled(run: Finished, profile: SharedDocument) -> float:
    path = run.path / PROFILE
    if not same_program(run.plan_as_run, profile):
        raise RunError(f"{path} is of another plan than its folder: remove it, or profile again")
    if profile.step_seconds is None:
        raise RunError(f"{path} has no seconds of a step: remove it, or profile again")
    return profile.step_seconds


def _placed(plan: Plan, machine: ClusterFile) -> Plan:
    return replace(plan, cluster=machine.cluster(plan.layout.world))
