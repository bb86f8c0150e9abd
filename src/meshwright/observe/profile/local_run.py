"""Profile of a plan on this machine alone: checks that it can run here, and starts its processes."""

import os
from collections.abc import Callable

import torch

from meshwright.observe.profile.measure import STEPS, Profile, RankProfile, measure
from meshwright.observe.ranks import RankError, on_ranks
from meshwright.spec import Plan
from meshwright.spec.errors import DoesNotFit, PlanError, RunError
from meshwright.spec.presets import device, device_names
from meshwright.spec.units import many
from meshwright.training.device import pick_device
from meshwright.training.fits import check_fits

PER_CORE = 8
"""Processes per core that still make progress; more would only wait for each other."""
LIMIT_S = 3600.0


def profile(plan: Plan, *, steps: int = STEPS, progress: Callable[[str], None] | None = None) -> Profile:
    """Measure a plan on processes of this machine: on its GPUs if it has some (one each), else on its cores.

    Raises PlanError or IllegalLayout when it cannot run, or not here, DoesNotFit, and RunError when a process fails.
    """
    plan.check()
    refuse_elsewhere(plan)
    check_fits(plan, pick_device())
    if plan.layout.world == 1:
        return Profile(plan=plan, ranks=(measure(plan, steps=steps, progress=progress),))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if progress is not None:
        progress(f"{plan.layout.world} processes of this machine, each three times over")
    try:
        ranks = on_ranks(plan.layout.world, _measure_rank, plan, steps, limit_s=LIMIT_S, device=kind)
    except RankError as error:
        raise _short_error(error) from None
    return Profile(plan=plan, ranks=tuple(ranks))


def _measure_rank(plan: Plan, steps: int) -> RankProfile:
    return measure(plan, steps=steps)


def refuse_elsewhere(plan: Plan) -> None:
    """Raise PlanError for a plan made for absent hardware, or with more ranks than this machine can run."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name, world = plan.cluster.device.name, plan.layout.world
    meant = plan.cluster.device.memory_bytes and any(
        name == device(known).name for known in device_names() if known != "local"
    )
    if meant and not gpus:
        raise PlanError(
            f"this machine has no GPU, and the plan is for {many(plan.cluster.devices, 'device')} of the kind "
            f"{name}: start it there with torchrun, or take meshwright dryrun, which needs none"
        )
    if gpus and world > gpus:
        raise PlanError(
            f"this machine has too few GPUs: the layout has {many(world, 'rank')}, and there are "
            f"{many(gpus, 'GPU')}. Start it with torchrun on enough GPUs, or take meshwright dryrun, which "
            "needs none"
        )
    cores = len(os.sched_getaffinity(0))
    if not gpus and world > PER_CORE * cores:
        raise PlanError(
            f"this machine is too small: the layout has {many(world, 'rank')}, and {many(cores, 'core')} run "
            f"at most {PER_CORE * cores} processes. Start it on more machines with torchrun, or take "
            "meshwright dryrun"
        )


def _short_error(error: RankError) -> Exception:
    head, _, rest = str(error).partition(":\n")
    last = next((line for line in reversed(rest.splitlines()) if line.strip()), head).strip()
    kind, _, words = last.partition(": ")
    if kind.endswith("DoesNotFit") or "out of memory" in last.lower() or "can't allocate memory" in last:
        return DoesNotFit(f"{head}: {words or last}")
    return RunError(f"{head} failed: {words if '.errors.' in kind else last}")
