"""A dry run as the JSON document that `plan`, `dryrun` and `profile` share (docs/planner.md), and whether it fits."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from meshwright import __version__
from meshwright.observe.dryrun.rank_run import ProgramPart, WatchedRank
from meshwright.observe.dryrun.simulate import DryRun
from meshwright.parallel.traffic import Counts
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.memory.rank_memory import DRIVER_BYTES
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec.places import pipeline_ranks, place_of
from meshwright.spec.plan import Plan, as_document
from meshwright.spec.schedule import phase_words
from meshwright.spec.units import gib
from meshwright.training.available_memory import PROCESS_BYTES, machine_memory
from meshwright.training.fits import capacity_bytes, shared_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that a plan is judged against."""

    of: str
    """Whose: the plan's device, `the GPU here` or `this machine`."""
    usable_bytes: int
    """0 = not known."""
    total_bytes: int = 0
    """Of which that is left; 0 = the same."""
    machines: int = 0
    """Over which the ranks are spread that share it; 0 = each rank has its own."""


def dry(found: DryRun, room: Room | None = None, of_places: Mapping[int, float] | None = None) -> dict[str, Any]:
    """Memory and traffic of the worst rank, and of every rank that was run. A dry run takes no time: those are null.
    `room` and `of_places`: see `needed_bytes`."""
    worst = found.worst
    room = room or room_of(found.plan, found.device)
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
        "capacity_bytes": room.usable_bytes,
        "capacity_of": room.of,
        "needed_bytes": needed_bytes(found, room, of_places),
        "staging_bytes": worst.staging_bytes,
        "reserve_bytes": reserve_bytes(found.device),
        "fits": fits(found, room, of_places),
        "ranks": [_rank(found, one) for one in found.ranks],
        "notes": list(found.notes),
    }


def fits(found: DryRun, room: Room, of_places: Mapping[int, float] | None = None) -> bool | None:
    """Whether the plan does, with what comes to its tensors; None where it is not known what there is."""
    return needed_bytes(found, room, of_places) <= room.usable_bytes if room.usable_bytes else None


def needed_bytes(found: DryRun, room: Room, of_places: Mapping[int, float] | None = None) -> int:
    """Of the fullest rank, or of all that share the room. A pipeline place of which no rank was run is taken for as
    full as the fullest, or in proportion to it as `of_places` (what the planner says of each) has it."""
    worst = found.worst
    if not room.machines:
        return worst.peak_bytes + reserve_bytes(found.device)
    layout = found.plan.layout
    seen = {place_of(layout, one.rank)["pp"]: one.peak_bytes for one in found.ranks}
    share = worst.peak_bytes / of_places[place_of(layout, worst.rank)["pp"]] if of_places else 0.0
    peaks = {}
    for place, rank in enumerate(pipeline_ranks(layout)):
        guess = of_places[place] * share if of_places else worst.peak_bytes
        peaks[rank] = seen.get(place, round(guess))
    return shared_bytes(found.plan, peaks, room.machines)


def reserve_bytes(device: str) -> int:
    """What a program takes of a GPU through torch's allocator beside its tensors (workspaces of matrix products), as
    the planner counts it; a CPU's libraries have their own."""
    return int(MESHWRIGHT.reserve_bytes) if device == "cuda" else 0


def unfit(found: DryRun, room: Room, needed_bytes: int) -> str:
    """One line: how much is missing, of what."""
    worst = found.worst
    kind = max(worst.kinds, key=worst.kinds.__getitem__)
    return (
        f"the dry run of rank {worst.rank} needs {needed(found)} ({phase_words(worst.when)}; most of it "
        f"{kind}: {gib(worst.kinds[kind])}){judged(found, room, needed_bytes)}: `meshwright plan` names layouts that "
        "fit"
    )


def judged(found: DryRun, room: Room, needed_bytes: int) -> str:
    """`; 2 ranks need 4.0 GiB and 21.9 GiB of this machine's 23.5 GiB are usable`; empty where no room is known."""
    if not room.usable_bytes:
        return ""
    ranks = found.plan.layout.world // room.machines if room.machines else 1
    together = f"{ranks} ranks need {gib(needed_bytes)}, " if ranks > 1 else ""
    whole = f"'s {gib(room.total_bytes)}" if room.total_bytes else ""
    return (
        f"; {together}{gib(room.usable_bytes)} of {room.of}{whole} {'are available' if room.machines else 'are usable'}"
    )


def needed(found: DryRun) -> str:
    """The peak of its tensors, and what comes to it."""
    reserve = reserve_bytes(found.device)
    return gib(found.worst.peak_bytes) + (f" and {gib(reserve)} of workspaces" if reserve else "")


def room_here(plan: Plan, target: torch.device, machines: int = 1) -> Room:
    """What a run has of the machine that is there; of a GPU, what the plan's has where that is less."""
    if target.type == "cpu":
        return _machine(plan, machines)
    here = Room(of="the GPU here", usable_bytes=max(1, int(capacity_bytes(target) - DRIVER_BYTES)))
    described = room_of(plan, "cuda")
    return described if plan.cluster.device.is_gpu and 0 < described.usable_bytes < here.usable_bytes else here


def room_of(plan: Plan, device: str) -> Room:
    """What a program has of the plan's device; of this machine, where a CPU's kernels (`device`) are asked for and the
    plan's device is a GPU or not described."""
    own = plan.cluster.device
    if own.memory_bytes and (device == "cuda" or not own.is_gpu):
        return Room(of=own.name, usable_bytes=max(1, int(usable_bytes(plan))), total_bytes=own.memory_bytes)
    if device == "cpu":
        return _machine(plan, 1)
    here = torch.cuda.is_available()
    usable = max(1, int(capacity_bytes(torch.device("cuda")) - DRIVER_BYTES)) if here else 0
    return Room(of="the GPU here", usable_bytes=usable)


def _machine(plan: Plan, machines: int) -> Room:
    """All ranks of a machine share its memory, and each is a process with libraries of its own."""
    memory, ranks = machine_memory(), max(1, plan.layout.world // machines)
    usable = max(1, memory.available_bytes - ranks * PROCESS_BYTES)
    return Room(of="this machine", usable_bytes=usable, total_bytes=memory.total_bytes, machines=machines)


def _rank(found: DryRun, one: WatchedRank) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "peak_bytes": one.peak_bytes,
        "staging_bytes": one.staging_bytes,
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


def _part(part: ProgramPart) -> dict[str, Any]:
    return {"name": part.name, "peak_bytes": part.peak_bytes, "memory": kinds(part.kinds)}


def largest(one: WatchedRank) -> list[dict[str, Any]]:
    """Rows of the largest tensors."""
    return [{**asdict(large), "shape": list(large.shape)} for large in one.largest]


def kinds(held: dict[str, int]) -> list[dict[str, Any]]:
    """Rows of memory."""
    return [{"kind": kind, "bytes": size} for kind, size in held.items()]


def traffic(counts: Counts) -> list[dict[str, Any]]:
    """Rows of traffic."""
    return [
        {"axis": axis, "collective": collective, "bytes": sent, "calls": calls}
        for (axis, collective), (calls, sent) in sorted(counts.items())
    ]
