"""`dry_run`: peak memory and traffic of the real program, without its hardware."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api import plan_reading
from meshwright.api.answer import Answer
from meshwright.api.arguments import HasPlan, checked
from meshwright.api.markup import LISTED, line, memory_bar, table, whole
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, DoesNotFit
from meshwright.spec.places import check_ranks
from meshwright.spec.units import gib

if TYPE_CHECKING:
    from meshwright.observe.dryrun.dryrun_document import Room
    from meshwright.observe.dryrun.simulate import DryRun


@dataclass(frozen=True, kw_only=True, repr=False)
class DryRunAnswer(Answer):
    """What the program of a plan would hold and send."""

    found: "DryRun"
    """Rank by rank, as it was run."""
    room: "Room"
    """What it is judged against."""

    @property
    def plan(self) -> Plan:
        """What was run."""
        return self.found.plan

    @property
    def peak_bytes(self) -> int:
        """Of the tensors of the rank that needs most."""
        return self.found.peak_bytes

    @property
    def peak_rank(self) -> int:
        """That rank."""
        return self.found.worst.rank

    @property
    def when(self) -> str:
        """Where in the step it needs most."""
        return self.found.worst.when

    @property
    def memory(self) -> dict[str, int]:
        """What the peak is made of: kind -> bytes."""
        return {kind: size for kind, size in self.found.worst.kinds.items() if size}

    @property
    def fits(self) -> bool | None:
        """Whether the plan does; None where it is not known what there is."""
        return self.needed_bytes <= self.room.usable_bytes if self.room.usable_bytes else None

    @property
    def needed_bytes(self) -> int:
        """Of the room that it is judged against: tensors, and what comes to them."""
        from meshwright.observe.dryrun.dryrun_document import needed_bytes

        return needed_bytes(self.found, self.room)

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be known to read the figures."""
        return self.found.notes

    def to_dict(self) -> dict[str, Any]:
        """The document that `meshwright dryrun --json` prints."""
        from meshwright.observe.dryrun.dryrun_document import dry_run_document

        return dry_run_document(self.found, self.room)

    def check(self) -> None:
        """DoesNotFit where it does not: how much is missing, of what."""
        from meshwright.observe.dryrun.dryrun_document import unfit_message

        if self.fits is False:
            raise DoesNotFit(unfit_message(self.found, self.room, self.needed_bytes))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each kind of memory of each rank, at the peak of that rank."""
        return [
            {"rank": seen.rank, "when": seen.when, "kind": kind, "bytes": size}
            for seen in self.found.ranks
            for kind, size in seen.kinds.items()
        ]

    def traffic_rows(self) -> list[dict[str, Any]]:
        """A row for each collective of each rank: what it sends in a step."""
        return [{"rank": one["rank"], **sent} for one in self.to_dict()["ranks"] for sent in one["traffic"]]

    def __repr__(self) -> str:
        verdict = {True: "fits", False: "does not fit", None: "not judged"}[self.fits]
        of = f" of {gib(self.room.usable_bytes)} of {self.room.owner}" if self.room.usable_bytes else ""
        return (
            f"{self.plan.model.name}: {verdict}: {gib(self.needed_bytes)}{of}; tensors "
            f"{gib(self.peak_bytes)} on rank {self.peak_rank}, {self.when}"
        )

    def _repr_html_(self) -> str:
        needed, usable = self.needed_bytes, self.room.usable_bytes
        words = {True: "Fits", False: "Does not fit", None: "Not judged: the device's memory is not known"}
        of = f": needs {gib(needed)}, {gib(usable)} of {self.room.owner} are usable" if usable else ""
        ranks = sorted(self.found.ranks, key=lambda seen: -seen.peak_bytes)[:LISTED]
        rows = [(str(seen.rank), gib(seen.peak_bytes), seen.when) for seen in ranks]
        sent = [one for one in self.traffic_rows() if one["rank"] == self.peak_rank]
        collectives = [(f"{one['axis']} {one['collective']}", f"{one['calls']:,}", gib(one["bytes"])) for one in sent]
        return whole(
            line(f"{words[self.fits]}{of}", "alarm" if self.fits is False else "good" if self.fits else ""),
            line(f"{self.plan.model.name}, tensors of rank {self.peak_rank} at their peak ({self.when})"),
            memory_bar(self.memory),
            table(("rank", "peak", "when"), rows) if len(rows) > 1 else "",
            table((f"rank {self.peak_rank} sends in a step", "calls", "bytes"), collectives) if collectives else "",
            *map(line, self.notes),
        )


@checked
def dry_run(
    *plan: str | Path | Plan | HasPlan,
    ranks: Sequence[int] = (),
    device: str = "",
    load: float = 1.0,
    whole: bool = False,
    told: Callable[[int, int], None] | None = None,
    **keys: Any,
) -> DryRunAnswer:
    """Run the program that `train` runs on tensors without values, for one rank of each pipeline stage.

    `plan`: a plan file, a plan or an answer about one, and KEY=VALUE changes; keywords are keys of a plan file, as
    model="llama-tiny", layout={"tp": 2}. `ranks`: only these. `device`: cuda or cpu, whose kernels. `load`: of a
    mixture of experts, rows that a rank's experts get over an even share. `whole`: every micro-batch of a step. `told`
    of ranks done and of all. PlanError, IllegalLayout; that it does not fit is an answer (`fits`, `check`).
    """
    asked = read_plan(plan, keys, device=device, load=load)
    check_ranks(asked.layout, ranks)
    from meshwright.observe.dryrun.dryrun_document import room_of  # loads torch
    from meshwright.observe.dryrun.simulate import dry_run as simulate

    found = simulate(asked, ranks=ranks, device=device, load=load, whole=whole, progress=told)
    return DryRunAnswer(found=found, room=room_of(found.plan, found.device))


def read_plan(words: Sequence[Any], keys: Mapping[str, Any], *, device: str, load: float) -> Plan:
    """The plan of a dry run; a degree that is `auto` takes what the plan's cluster has."""
    plan, _ = plan_reading.read_plan(words, keys, processes=None, notes=[])
    if device not in ("", "cpu", "cuda"):
        raise ArgumentError(f"device={device} is not known: take cpu or cuda")
    if not 0 < load < float("inf"):
        raise ArgumentError(f"load={load} must be a number above 0 (1 = even)")
    if load != 1 and plan.model.moe is None:
        raise ArgumentError(f"load={load:g} is for mixtures of experts, and {plan.model.name} has none: leave it out")
    return plan
