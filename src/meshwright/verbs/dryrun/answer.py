"""`dry_run`: peak memory and traffic of the real program, without its hardware."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.interface.answers.answer import Answer, HasPlan, checked
from meshwright.interface.answers.markup import LISTED, line, memory_bar, table, whole
from meshwright.interface.planning import plan_reading
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, DoesNotFit
from meshwright.spec.layout.layout import check_ranks
from meshwright.spec.rules.legal import check_offload
from meshwright.spec.units import gib

if TYPE_CHECKING:
    from meshwright.observe.dryrun.document import Room
    from meshwright.observe.dryrun.simulate import DryRun


@dataclass(frozen=True, kw_only=True, repr=False)
class DryRunAnswer(Answer):
    """Memory and traffic of the program of a plan."""

    simulation: "DryRun"
    """The simulated run, rank by rank."""
    room: "Room"
    """Memory that it is judged against."""

    @property
    def plan(self) -> Plan:
        """The plan that was run."""
        return self.simulation.plan

    @property
    def peak_bytes(self) -> int:
        """Tensors of the rank that needs most."""
        return self.simulation.peak_bytes

    @property
    def peak_rank(self) -> int:
        """The rank that needs most."""
        return self.simulation.worst.rank

    @property
    def when(self) -> str:
        """Phase of the step with the peak."""
        return self.simulation.worst.when

    @property
    def memory(self) -> dict[str, int]:
        """Parts of the peak: kind -> bytes."""
        return {kind: size for kind, size in self.simulation.worst.kinds.items() if size}

    @property
    def fits(self) -> bool | None:
        """Does the plan fit? None = the memory of the device is unknown."""
        return self.needed_bytes <= self.room.usable_bytes if self.room.usable_bytes else None

    @property
    def needed_bytes(self) -> int:
        """Memory needed: tensors, and what is counted on top of them."""
        from meshwright.observe.dryrun.document import needed_bytes

        return needed_bytes(self.simulation, self.room)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on how to read the figures."""
        return self.simulation.notes

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright dryrun --json` prints."""
        from meshwright.observe.dryrun.document import dry_run_document

        return dry_run_document(self.simulation, self.room)

    def check(self) -> None:
        """Raise DoesNotFit, with how much memory is missing, for a plan that does not fit."""
        from meshwright.observe.dryrun.document import unfit_message

        if self.fits is False:
            raise DoesNotFit(unfit_message(self.simulation, self.room, self.needed_bytes))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each kind of memory of each rank, at the peak of that rank."""
        return [
            {"rank": rank.rank, "when": rank.when, "kind": kind, "bytes": size}
            for rank in self.simulation.ranks
            for kind, size in rank.kinds.items()
        ]

    def traffic_rows(self) -> list[dict[str, Any]]:
        """Return a row for each collective of each rank: bytes sent in a step."""
        return [{"rank": rank["rank"], **sent} for rank in self.to_dict()["ranks"] for sent in rank["traffic"]]

    def __repr__(self) -> str:
        verdict = {True: "fits", False: "does not fit", None: "not judged"}[self.fits]
        room = f" of {gib(self.room.usable_bytes)} of {self.room.owner}" if self.room.usable_bytes else ""
        return (
            f"{self.plan.model.name}: {verdict}: {gib(self.needed_bytes)}{room}; tensors "
            f"{gib(self.peak_bytes)} on rank {self.peak_rank}, {self.when}"
        )

    def _repr_html_(self) -> str:
        needed, usable = self.needed_bytes, self.room.usable_bytes
        words = {True: "Fits", False: "Does not fit", None: "Not judged: the device's memory is not known"}
        room = f": needs {gib(needed)}, {gib(usable)} of {self.room.owner} are usable" if usable else ""
        ranks = sorted(self.simulation.ranks, key=lambda rank: -rank.peak_bytes)[:LISTED]
        rows = [(str(rank.rank), gib(rank.peak_bytes), rank.when) for rank in ranks]
        sent = [traffic for traffic in self.traffic_rows() if traffic["rank"] == self.peak_rank]
        collectives = [
            (f"{traffic['axis']} {traffic['collective']}", f"{traffic['calls']:,}", gib(traffic["bytes"]))
            for traffic in sent
        ]
        return whole(
            line(f"{words[self.fits]}{room}", "alarm" if self.fits is False else "good" if self.fits else ""),
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
    """Run the program of `train` on tensors without values, for one rank of each pipeline stage.

    A plan that does not fit raises nothing: see `fits` and `check`. Raises PlanError and IllegalLayout.

    Args:
        plan: A plan file, a plan or an answer about one, and KEY=VALUE changes.
        ranks: Run these ranks only.
        device: Kernels of cuda or cpu. Empty = those of the plan's cluster.
        load: Mixture of experts: rows of a rank's experts, as a multiple of an even share.
        whole: Run every micro-batch of a step.
        told: Called with the numbers of finished and of all ranks.
        keys: Keys of a plan file, as model="llama-tiny", layout={"tp": 2}.
    """
    parsed = read_plan(plan, keys, device=device, load=load)
    # Before torch is loaded, so that a mistyped rank costs no seconds.
    check_ranks(parsed.layout, ranks)
    from meshwright.observe.dryrun.document import room_of  # loads torch
    from meshwright.observe.dryrun.simulate import device_of
    from meshwright.observe.dryrun.simulate import dry_run as simulate

    check_offload(parsed.layout, device or device_of(parsed))
    simulation = simulate(parsed, ranks=ranks, device=device, load=load, whole=whole, progress=told)
    return DryRunAnswer(simulation=simulation, room=room_of(simulation.plan, simulation.device))


def read_plan(words: Sequence[Any], keys: Mapping[str, Any], *, device: str, load: float) -> Plan:
    """Read the plan of a dry run. A degree that is `auto` takes the devices of the plan's cluster."""
    plan, _ = plan_reading.read_plan(words, keys, processes=None, notes=[])
    if device not in ("", "cpu", "cuda"):
        raise ArgumentError("device", device, "is not known", "take cpu or cuda")
    if not 0 < load < float("inf"):
        raise ArgumentError("load", load, "must be a number above 0 (1 = even)")
    if load != 1 and plan.model.moe is None:
        raise ArgumentError("load", load, f"is for mixtures of experts, and {plan.model.name} has none", "leave it out")
    return plan
