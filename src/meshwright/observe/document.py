"""A dry run as the JSON document that `plan`, `dryrun` and `profile` share (docs/planner.md), and what fits."""

from typing import Any

import torch

from meshwright import __version__
from meshwright.observe.dryrun import DryRun
from meshwright.observe.watched import Part, Seen
from meshwright.parallel.traffic import Counts
from meshwright.planner.memory import DRIVER_BYTES
from meshwright.planner.search import usable_bytes
from meshwright.planner.stack import MESHWRIGHT
from meshwright.spec.plan import Plan, as_document
from meshwright.train.fits import capacity_bytes


def dry(found: DryRun) -> dict[str, Any]:
    """Memory and traffic of the worst rank, and of every rank that was run. A dry run takes no time: those are null."""
    worst = found.worst
    room = room_bytes(found.plan, found.device)
    return {
        "source": "dryrun",
        "plan": as_document(found.plan),
        "device": found.device,
        "environment": {"meshwright": __version__},
        "peak_bytes": worst.peak_bytes,
        "peak_rank": worst.rank,
        "memory": kinds(worst.kinds),
        "traffic": traffic(found.traffic(worst.rank)),
        "time": [],
        "step_seconds": None,
        "tokens_per_second_per_device": None,
        "mfu_causal": None,
        "mfu_full": None,
        "hfu": None,
        "bubble_fraction": None,
        "capacity_bytes": room,
        "reserve_bytes": reserve_bytes(found.device),
        "fits": fits(found, room) if room else None,
        "ranks": [_rank(found, one) for one in found.ranks],
        "notes": list(found.notes),
    }


def fits(found: DryRun, room: int) -> bool:
    """Whether its fullest rank does, with what comes to its tensors."""
    return found.worst.peak_bytes + reserve_bytes(found.device) <= room


def reserve_bytes(device: str) -> int:
    """What a program takes of a GPU through torch's allocator beside its tensors (workspaces of matrix products), as
    the planner counts it; a CPU's libraries have their own."""
    return int(MESHWRIGHT.reserve_bytes) if device == "cuda" else 0


def room_here(plan: Plan, target: torch.device) -> int:
    """What a rank can have of the machine that is there, and of the plan's device where that has less."""
    here = capacity_bytes(target)
    here = here // plan.layout.world if target.type == "cpu" else max(1, int(here - DRIVER_BYTES))
    return min(here, room_bytes(plan, target.type))


def room_bytes(plan: Plan, device: str) -> int:
    """What a program can have of the plan's device, or of this machine's where the plan does not say; of a machine
    without GPUs each rank has its share. 0 = not known."""
    if plan.cluster.device.memory_bytes:
        return max(1, int(usable_bytes(plan)))
    if device == "cuda":
        here = torch.cuda.is_available()
        return max(1, int(capacity_bytes(torch.device("cuda")) - DRIVER_BYTES)) if here else 0
    return capacity_bytes(torch.device("cpu")) // plan.layout.world


def _rank(found: DryRun, one: Seen) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "peak_bytes": one.peak_bytes,
        "when": one.when,
        "memory": kinds(one.kinds),
        "activations": [{"where": where, "bytes": size} for where, size in one.where.items()],
        "largest": largest(one),
        "traffic": traffic(found.traffic(one.rank)),
        "parts": [_part(part) for part in one.parts],
        "passes": [_part(part) for part in one.passes],
        "micro_batches": list(found.run[one.rank]),
        "cost": {"seconds": found.costs[one.rank].seconds, "resident_bytes": found.costs[one.rank].resident_bytes},
    }  # fmt: skip


def _part(part: Part) -> dict[str, Any]:
    return {"name": part.name, "peak_bytes": part.peak_bytes, "memory": kinds(part.kinds)}


def largest(one: Seen) -> list[dict[str, Any]]:
    """Rows of the largest tensors."""
    return [
        {"bytes": large.size_bytes, "kind": large.kind, "shape": list(large.shape), "dtype": large.dtype,
         "line": large.line, "operation": large.operation, "module": large.module, "phase": large.phase}
        for large in one.largest
    ]  # fmt: skip


def kinds(held: dict[str, int]) -> list[dict[str, Any]]:
    """Rows of memory."""
    return [{"kind": kind, "bytes": size} for kind, size in held.items()]


def traffic(counts: Counts) -> list[dict[str, Any]]:
    """Rows of traffic."""
    return [
        {"axis": axis, "collective": collective, "bytes": sent, "calls": calls}
        for (axis, collective), (calls, sent) in sorted(counts.items())
    ]
