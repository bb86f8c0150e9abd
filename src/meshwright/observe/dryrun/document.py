"""JSON document of a dry run, shared with `plan` and `profile` (docs/planner.md), and whether the plan fits."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from meshwright import __version__
from meshwright.observe.dryrun.rank_run import ProgramPart, WatchedRank
from meshwright.observe.dryrun.simulate import DryRun
from meshwright.parallel.groups.group import Counts
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.memory.rank_memory import DRIVER_BYTES
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec.layout.layout import pipeline_ranks, place_of
from meshwright.spec.layout.schedule import phase_words
from meshwright.spec.plan.plan import Plan, as_document
from meshwright.spec.units import gib
from meshwright.training.fits import PROCESS_BYTES, capacity_bytes, machine_memory, shared_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory that a plan is judged against."""

    owner: str
    """Owner of the memory: the plan's device, `the GPU here` or `this machine`."""
    usable_bytes: int
    """Bytes that the plan may use. 0 = not known."""
    total_bytes: int = 0
    """Size of that memory. 0 = the usable bytes."""
    machines: int = 0
    """Number of machines over which the ranks that share it are spread. 0 = each rank has its own memory."""


def dry_run_document(
    dry_run: DryRun, room: Room | None = None, stage_peaks: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Return memory and traffic of the worst rank, and of every rank that was run.

    A dry run takes no time, so times are null. `room` and `stage_peaks`: see `needed_bytes`.
    """
    worst = dry_run.worst
    room = room or room_of(dry_run.plan, dry_run.device)
    return {
        "source": "dryrun",
        "plan": as_document(dry_run.plan),
        "device": dry_run.device,
        "environment": {"meshwright": __version__},
        "peak_bytes": worst.peak_bytes,
        "peak_rank": worst.rank,
        "memory": kinds(worst.kinds),
        "traffic": traffic(dry_run.traffic(worst.rank)),
        "time": [],
        "step_seconds": None,
        "tokens_per_second_per_device": None,
        "mfu_causal": None,
        "mfu_full": None,
        "hfu": None,
        "bubble_fraction": None,
        "capacity_bytes": room.usable_bytes,
        "capacity_of": room.owner,
        "needed_bytes": needed_bytes(dry_run, room, stage_peaks),
        "staging_bytes": worst.staging_bytes,
        "reserve_bytes": reserve_bytes(dry_run.device),
        "fits": fits(dry_run, room, stage_peaks),
        "ranks": [_rank_document(dry_run, watched) for watched in dry_run.ranks],
        "notes": list(dry_run.notes),
    }


def fits(dry_run: DryRun, room: Room, stage_peaks: Mapping[int, float] | None = None) -> bool | None:
    """Return whether the plan fits, workspaces included. None = the room is not known."""
    return needed_bytes(dry_run, room, stage_peaks) <= room.usable_bytes if room.usable_bytes else None


def needed_bytes(dry_run: DryRun, room: Room, stage_peaks: Mapping[int, float] | None = None) -> int:
    """Return the bytes of the fullest rank, or of all ranks that share the room.

    A pipeline stage of which no rank was run counts as full as the fullest. With `stage_peaks` (the planner's bytes of
    each stage) it counts in proportion to it.
    """
    worst = dry_run.worst
    if not room.machines:
        return worst.peak_bytes + reserve_bytes(dry_run.device)
    layout = dry_run.plan.layout
    run_peaks = {place_of(layout, watched.rank)["pp"]: watched.peak_bytes for watched in dry_run.ranks}
    # Only some stages were run. The planner's ratio between stages is better known than its absolute figure.
    share = worst.peak_bytes / stage_peaks[place_of(layout, worst.rank)["pp"]] if stage_peaks else 0.0
    peaks = {}
    for stage, rank in enumerate(pipeline_ranks(layout)):
        guess = stage_peaks[stage] * share if stage_peaks else worst.peak_bytes
        peaks[rank] = run_peaks.get(stage, round(guess))
    return shared_bytes(dry_run.plan, peaks, room.machines)


def reserve_bytes(device: str) -> int:
    """Return the bytes that torch's allocator takes of a GPU in addition to tensors (workspaces of matrix products).

    The planner counts the same. Libraries of a CPU manage their own memory.
    """
    return int(MESHWRIGHT.reserve_bytes) if device == "cuda" else 0


def unfit_message(dry_run: DryRun, room: Room, needed_bytes: int) -> str:
    """Say in one line how much memory is missing, and of what."""
    worst = dry_run.worst
    kind = max(worst.kinds, key=worst.kinds.__getitem__)
    return (
        f"the dry run of rank {worst.rank} needs {needed_text(dry_run)} ({phase_words(worst.when)}; most of it "
        f"{kind}: {gib(worst.kinds[kind])}){room_sentence(dry_run, room, needed_bytes)}: "
        "`meshwright plan` names layouts that fit"
    )


def room_sentence(dry_run: DryRun, room: Room, needed_bytes: int) -> str:
    """Return `; 2 ranks need 4.0 GiB and 21.9 GiB of this machine's 23.5 GiB are usable`, if the room is known."""
    if not room.usable_bytes:
        return ""
    ranks = dry_run.plan.layout.world // room.machines if room.machines else 1
    together = f"{ranks} ranks need {gib(needed_bytes)}, " if ranks > 1 else ""
    size = f"'s {gib(room.total_bytes)}" if room.total_bytes else ""
    state = "are available" if room.machines else "are usable"
    return f"; {together}{gib(room.usable_bytes)} of {room.owner}{size} {state}"


def needed_text(dry_run: DryRun) -> str:
    """Return the peak of the tensors and the workspaces, in words."""
    reserve = reserve_bytes(dry_run.device)
    return gib(dry_run.worst.peak_bytes) + (f" and {gib(reserve)} of workspaces" if reserve else "")


def room_here(plan: Plan, target: torch.device, machines: int = 1) -> Room:
    """Return the memory that a run has on this machine; of a GPU, that of the plan's device where it is less."""
    if target.type == "cpu":
        return _room_of_machine(plan, machines)
    room = Room(owner="the GPU here", usable_bytes=max(1, int(capacity_bytes(target) - DRIVER_BYTES)))
    # A plan for a smaller device than the one here must fit there, too.
    described = room_of(plan, "cuda")
    return described if plan.cluster.device.is_gpu and 0 < described.usable_bytes < room.usable_bytes else room


def room_of(plan: Plan, device: str) -> Room:
    """Return the memory of the plan's device.

    It is that of this machine if a CPU's kernels (`device`) are asked for and the plan's device is a GPU or not
    described.
    """
    planned_device = plan.cluster.device
    if planned_device.memory_bytes and (device == "cuda" or not planned_device.is_gpu):
        return Room(
            owner=planned_device.name,
            usable_bytes=max(1, int(usable_bytes(plan))),
            total_bytes=planned_device.memory_bytes,
        )
    if device == "cpu":
        return _room_of_machine(plan, 1)
    has_gpu = torch.cuda.is_available()
    usable = max(1, int(capacity_bytes(torch.device("cuda")) - DRIVER_BYTES)) if has_gpu else 0
    return Room(owner="the GPU here", usable_bytes=usable)


def _room_of_machine(plan: Plan, machines: int) -> Room:
    """Return this machine's memory. All ranks share it, and each is a process with its own libraries."""
    # Libraries of each process take memory that no dry run of its tensors sees.
    memory, ranks = machine_memory(), max(1, plan.layout.world // machines)
    usable = max(1, memory.available_bytes - ranks * PROCESS_BYTES)
    return Room(owner="this machine", usable_bytes=usable, total_bytes=memory.total_bytes, machines=machines)


def _rank_document(dry_run: DryRun, watched: WatchedRank) -> dict[str, Any]:
    return {
        "rank": watched.rank,
        "peak_bytes": watched.peak_bytes,
        "staging_bytes": watched.staging_bytes,
        "when": watched.when,
        "memory": kinds(watched.kinds),
        "activations": [{"where": where, "bytes": size} for where, size in watched.where.items()],
        "largest": largest(watched),
        "traffic": traffic(dry_run.traffic(watched.rank)),
        "parts": [_part_document(part) for part in watched.parts],
        "passes": [_part_document(part) for part in watched.passes],
        "micro_batches": list(dry_run.run[watched.rank]),
        "cost": asdict(dry_run.costs[watched.rank]),
    }  # fmt: skip


def _part_document(part: ProgramPart) -> dict[str, Any]:
    return {"name": part.name, "peak_bytes": part.peak_bytes, "memory": kinds(part.kinds)}


def largest(watched: WatchedRank) -> list[dict[str, Any]]:
    """Return rows of the largest tensors."""
    return [{**asdict(large), "shape": list(large.shape)} for large in watched.largest]


def kinds(held: dict[str, int]) -> list[dict[str, Any]]:
    """Return rows of memory."""
    return [{"kind": kind, "bytes": size} for kind, size in held.items()]


def traffic(counts: Counts) -> list[dict[str, Any]]:
    """Return rows of traffic."""
    return [
        {"axis": axis, "collective": collective, "bytes": sent, "calls": calls}
        for (axis, collective), (calls, sent) in sorted(counts.items())
    ]
