"""`profile`: a few real steps of a plan, measured and kept in its run folder."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import planfile
from meshwright.interface.answers.answer import Answer, HasPlan, checked, plain
from meshwright.interface.answers.markup import LISTED, line, memory_bar, table, time_bar, whole
from meshwright.interface.planning.plan_reading import read_plan
from meshwright.interface.process.environment import fix_cublas_workspace
from meshwright.observe.compare.finished_run import refuse_other
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError
from meshwright.spec.units import count, duration, gib, many
from meshwright.store.default_folders import is_open, point_latest, settle_run
from meshwright.store.durable import refuse_unwritable, replace_file, report_in_one_line

if TYPE_CHECKING:
    from meshwright.observe.profile.measure import Profile

Measure = Callable[["Plan"], "Profile | None"]


@dataclass(frozen=True, kw_only=True, repr=False)
class ProfileAnswer(Answer):
    """Memory, traffic and time of measured steps."""

    profile: "Profile"
    """The measurements, rank by rank."""
    plan: "Plan"
    """The plan, with the run folder that was chosen."""
    files: tuple[Path, ...]
    """The profile, and the trace for https://ui.perfetto.dev."""

    @property
    def run(self) -> Path:
        """Folder of the files, for `compare` and `report`."""
        return Path(self.plan.run)

    @property
    def step_seconds(self) -> float:
        """Time of the median timed step."""
        return self.profile.step_s

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all ranks together."""
        return self.profile.tokens_per_s

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest rank, by the allocator."""
        return self.profile.peak_bytes

    @property
    def memory(self) -> dict[str, int]:
        """Memory of that rank at its peak: kind -> bytes."""
        return {kind: size for kind, size in self.profile.worst.seen.kinds.items() if size}

    @property
    def time(self) -> dict[str, float]:
        """Time of the step on the busiest rank: part -> seconds."""
        return self.profile.parts

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright profile --json` prints."""
        from meshwright.observe.profile.profile_document import profile_document

        return profile_document(self.profile)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each rank: its peak, the memory of each kind, and the parts of the step."""
        return [
            {
                "rank": rank["rank"],
                "peak_bytes": rank["peak_bytes"],
                "reserved_bytes": rank["reserved_bytes"],
                **{f"{held['kind']}_bytes": held["bytes"] for held in rank["memory"]},
                **{f"{took['what']}_seconds": took["seconds"] for took in rank["time"]},
            }
            for rank in self.to_dict()["ranks"]
        ]

    def operation_rows(self) -> list[dict[str, Any]]:
        """Return a row for each operation of the busiest rank: calls, and its own time in a step."""
        busiest = self.profile.busiest.operations
        return [
            {"operation": operation.name, "calls": operation.calls, "seconds": operation.seconds}
            for operation in busiest
        ]

    def __repr__(self) -> str:
        ranks = many(len(self.profile.ranks), "rank")
        return (
            f"{self.plan.model.name} on {ranks}: {duration(self.step_seconds)} per step, "
            f"{count(self.tokens_per_second)} tokens/s, peak {gib(self.peak_bytes)} on rank {self.profile.worst.rank} "
            f"({self.run})"
        )

    def _repr_html_(self) -> str:
        lengths = self.profile.step_seconds
        operations = [
            (operation.name, str(operation.calls), duration(operation.seconds))
            for operation in self.profile.busiest.operations[:LISTED]
        ]
        return whole(
            line(f"{duration(self.step_seconds)} per step, {count(self.tokens_per_second)} tokens/s", "good"),
            line(
                f"{self.plan.model.name} on {many(len(self.profile.ranks), 'rank')}, {self.profile.ranks[0].device}; "
                f"{many(len(lengths), 'step')} timed, {duration(min(lengths))} to {duration(max(lengths))}"
            ),
            line(f"memory of rank {self.profile.worst.rank} at its peak: {gib(self.peak_bytes)}"),
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
    """Make a few real steps of a plan and measure them.

    It starts its own processes on this machine: one for each GPU, or processes on the CPU.

    Args:
        plan: A plan file, a plan or an answer about one, and KEY=VALUE changes.
        steps: Number of timed steps.
        told: Called with each line of progress.
        keys: Keys of a plan file, as run="runs/a".

    Raises:
        PlanError, IllegalLayout, DoesNotFit, RunError: The plan cannot be run here.
    """
    check_steps(steps)
    parsed, _ = read_plan(plan, keys)
    fix_cublas_workspace(parsed)

    def measure(plan: Plan) -> "Profile | None":
        from meshwright.observe.profile.measure import profile as measure_locally  # loads torch

        return measure_locally(plan, steps=steps, progress=told)

    answer = measure_and_keep(parsed, measure)
    assert answer is not None, "no launcher has started this process"
    return answer


def check_steps(steps: int) -> None:
    """Raise ArgumentError unless there is a step to time."""
    if steps < 1:
        raise ArgumentError("steps", steps, "must be at least 1")


def measure_and_keep(plan: "Plan", measure: Measure) -> ProfileAnswer | None:
    """Measure a plan and write the files into its run folder. None = another rank than the first."""
    # Set before torch is imported, here and in the processes to start: else its profiler logs to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    plan.check()
    refuse_unwritable(Path(plan.run))
    # A named folder may hold another plan, whose files would then describe two programs.
    if not is_open(plan.run):
        refuse_other(Path(plan.run), plan)
    measured = measure(plan)
    if measured is None:
        return None
    from meshwright.observe.profile.profile_document import trace

    # The number of a default folder is chosen last: a failed measurement leaves none behind.
    plan = replace(plan, run=settle_run(plan))
    answer = ProfileAnswer(
        profile=measured, plan=plan, files=(Path(plan.run, "profile.json"), Path(plan.run, "trace.json"))
    )
    _write(plan, {"profile.json": answer.to_dict(), "trace.json": trace(measured)})
    return answer


def _write(plan: "Plan", documents: Mapping[str, object]) -> None:
    """Write each file whole or not at all, and the plan if there is none, for `compare`, `report` and `calibrate`."""
    folder = Path(plan.run)
    with report_in_one_line(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "plan.yaml").exists():
            planfile.write(plan, folder / "plan.yaml")
        point_latest(folder)
        for name, document in documents.items():
            replace_file(folder / name, (json.dumps(plain(document), allow_nan=False) + "\n").encode())
