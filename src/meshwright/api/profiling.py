"""`profile`: a few real steps of a plan, measured, and kept in its run folder."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import planfile
from meshwright.api.answer import Answer
from meshwright.api.arguments import HasPlan, checked
from meshwright.api.determinism import set_environment
from meshwright.api.documents import plain
from meshwright.api.markup import LISTED, line, memory_bar, table, time_bar, whole
from meshwright.api.plan_reading import read_plan
from meshwright.observe.compare.finished_run import refuse_other
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError
from meshwright.spec.units import count, duration, gib, many
from meshwright.store import default_folders
from meshwright.store.default_folders import point_latest
from meshwright.store.durable import one_line, refuse_unwritable, replace_file

if TYPE_CHECKING:
    from meshwright.observe.profile.measure import Profile

Measure = Callable[["Plan"], "Profile | None"]


@dataclass(frozen=True, kw_only=True, repr=False)
class ProfileAnswer(Answer):
    """What the steps of a plan held, sent and took."""

    found: "Profile"
    """Rank by rank."""
    plan: "Plan"
    """With the run folder that was chosen."""
    files: tuple[Path, ...]
    """The profile, and the trace for https://ui.perfetto.dev."""

    @property
    def run(self) -> Path:
        """The folder in which they are: `compare` and `report` take it."""
        return Path(self.plan.run)

    @property
    def step_seconds(self) -> float:
        """Of the timed step in the middle by its length."""
        return self.found.step_s

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.found.tokens_per_s

    @property
    def peak_bytes(self) -> int:
        """Of the rank that held most, by the allocator's account."""
        return self.found.peak_bytes

    @property
    def memory(self) -> dict[str, int]:
        """What that rank held at its peak: kind -> bytes."""
        return {kind: size for kind, size in self.found.worst.seen.kinds.items() if size}

    @property
    def time(self) -> dict[str, float]:
        """What the busiest rank spent the step on: part -> seconds."""
        return self.found.parts

    def to_dict(self) -> dict[str, Any]:
        """The document that `meshwright profile --json` prints."""
        from meshwright.observe.profile.profile_document import profile_document

        return profile_document(self.found)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each rank: its peak, what it held of each kind, and the parts of the step."""
        return [
            {
                "rank": one["rank"],
                "peak_bytes": one["peak_bytes"],
                "reserved_bytes": one["reserved_bytes"],
                **{f"{held['kind']}_bytes": held["bytes"] for held in one["memory"]},
                **{f"{took['what']}_seconds": took["seconds"] for took in one["time"]},
            }
            for one in self.to_dict()["ranks"]
        ]

    def operation_rows(self) -> list[dict[str, Any]]:
        """A row for each operation of the busiest rank: calls, and its own time in a step."""
        busiest = self.found.busiest.operations
        return [{"operation": one.name, "calls": one.calls, "seconds": one.seconds} for one in busiest]

    def __repr__(self) -> str:
        ranks = many(len(self.found.ranks), "rank")
        return (
            f"{self.plan.model.name} on {ranks}: {duration(self.step_seconds)} per step, "
            f"{count(self.tokens_per_second)} tokens/s, peak {gib(self.peak_bytes)} on rank {self.found.worst.rank} "
            f"({self.run})"
        )

    def _repr_html_(self) -> str:
        lengths = self.found.step_seconds
        operations = [
            (one.name, str(one.calls), duration(one.seconds)) for one in self.found.busiest.operations[:LISTED]
        ]
        return whole(
            line(f"{duration(self.step_seconds)} per step, {count(self.tokens_per_second)} tokens/s", "good"),
            line(
                f"{self.plan.model.name} on {many(len(self.found.ranks), 'rank')}, {self.found.ranks[0].device}; "
                f"{many(len(lengths), 'step')} timed, {duration(min(lengths))} to {duration(max(lengths))}"
            ),
            line(f"memory of rank {self.found.worst.rank} at its peak: {gib(self.peak_bytes)}"),
            memory_bar(self.memory),
            line("a step of the busiest rank"),
            time_bar(self.time),
            table(("operation", "calls", "its own time"), operations),
            line(f"kept in {self.run}"),
        )


@checked
def profile(
    *plan: str | Path | Plan | HasPlan, steps: int = 4, told: Callable[[str], None] | None = None, **keys: Any
) -> ProfileAnswer:
    """Make a few real steps of a plan and measure them, on processes of this machine that it starts itself: one for
    each GPU, or of a CPU.

    `plan`: a plan file, a plan or an answer about one, and KEY=VALUE changes; keywords are keys of a plan file, as
    run="runs/a". `steps`: that are timed. `told` of what it does. PlanError, IllegalLayout, DoesNotFit, RunError.
    """
    check_steps(steps)
    asked, _ = read_plan(plan, keys)
    set_environment(asked)

    def measure(plan: Plan) -> "Profile | None":
        from meshwright.observe.profile.local_run import profile as measure_locally  # loads torch

        return measure_locally(plan, steps=steps, progress=told)

    answer = kept(asked, measure)
    assert answer is not None, "no launcher has started this process"
    return answer


def check_steps(steps: int) -> None:
    """ArgumentError where there are none to time."""
    if steps < 1:
        raise ArgumentError(f"steps={steps} must be at least 1")


def kept(plan: "Plan", measure: Measure) -> ProfileAnswer | None:
    """What `measure` finds, written into the run folder of the plan; None where it finds nothing, on other ranks than
    the first."""
    plan.check()
    refuse_unwritable(Path(plan.run))
    if not default_folders.is_open(plan.run):
        refuse_other(Path(plan.run), plan)
    found = measure(plan)
    if found is None:
        return None
    from meshwright.observe.profile.perfetto import trace

    plan = replace(plan, run=default_folders.settled(plan))
    answer = ProfileAnswer(found=found, plan=plan, files=(Path(plan.run, "profile.json"), Path(plan.run, "trace.json")))
    _write(plan, {"profile.json": answer.to_dict(), "trace.json": trace(found)})
    return answer


def _write(plan: "Plan", documents: Mapping[str, object]) -> None:
    """Each file whole or not at all, and the plan where none is there: with it the folder can be compared, reported and
    fed back. RunError where the folder cannot be written."""
    folder = Path(plan.run)
    with one_line(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "plan.yaml").exists():
            planfile.write(plan, folder / "plan.yaml")
        point_latest(folder)
        for name, document in documents.items():
            replace_file(folder / name, (json.dumps(plain(document), allow_nan=False) + "\n").encode())
