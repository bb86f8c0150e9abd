"""Step times of real runs fed back into a cluster file, from which the next plan for this machine starts."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.observe.compare.finished_run import PROFILE, FinishedRun, open_run, same_program
from meshwright.observe.shared_document import SharedDocument
from meshwright.planner.machine.clusterfile import ClusterFile
from meshwright.planner.machine.overheads import fit_overheads
from meshwright.spec.errors import RunError
from meshwright.spec.plan.plan import Plan

WARMING = 2
"""First steps of a run, which take longer: memory is new, kernels are chosen."""
FEW = 4
"""Smallest number of runs at which leaving one out tells how well the others predict it."""


def learn(machine: ClusterFile, runs: Sequence[Path]) -> tuple[ClusterFile, list[tuple[Plan, float]]]:
    """Fit the machine's overheads to the steps of these runs. Return it with (plan, seconds per step) of each.

    A run with another number of ranks than a node was measured with counts as if on it. Raises RunError for a missing
    or damaged run, one with too few steps, or a profile of another plan.
    """
    finished = [open_run(path) for path in runs]
    timed = [
        (replace(run.plan_as_run, cluster=machine.cluster(run.plan_as_run.layout.world)), seconds_of(run))
        for run in finished
    ]
    # With few runs nothing can be left out to judge the fit, so the steps are believed as they are.
    trust = 1.0 if len(timed) < FEW else None
    improved = fit_overheads(machine, [plan for plan, _ in timed], [seconds for _, seconds in timed], trust)
    names = ", ".join(str(path) for path in runs)
    provenance = {**improved.provenance, "learned": f"from the steps of {names}"}
    return replace(improved, provenance=provenance), timed


def seconds_of(run: FinishedRun) -> float:
    """Return the median step of a run without waits for data. Raises RunError for a wrong profile or too few steps."""
    if run.profile is not None:
        return _profiled(run, run.profile)
    # During a batch warm-up steps are shorter; only steps of the final batch tell its time.
    last = run.plan_as_run.recipe.global_batch
    full_batch_steps = [row for row in run.steps if row.get("global_batch", last) == last]
    durations_s = [row["step_seconds"] - (row.get("data_wait_seconds") or 0.0) for row in full_batch_steps]
    if len(durations_s) <= WARMING:
        raise RunError(f"{run.path} has {len(durations_s)} steps: it takes {WARMING + 1} or more to learn from a run")
    seconds = float(statistics.median(durations_s[WARMING:]))
    if seconds <= 0:
        raise RunError(f"{run.path / 'metrics.jsonl'} is of another program: its steps took no time")
    return seconds


def _profiled(run: FinishedRun, profile: SharedDocument) -> float:
    path = run.path / PROFILE
    if not same_program(run.plan_as_run, profile):
        raise RunError(f"{path} is of another plan than its folder: remove it, or profile again")
    if profile.step_seconds is None:
        raise RunError(f"{path} has no seconds of a step: remove it, or profile again")
    return profile.step_seconds
