"""All rules over the traces of a world."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from meshwright.observe.check.deadlock import deadlocks
from meshwright.observe.check.events import RankTrace, Start, Touch, Violation, WaitEvent
from meshwright.observe.check.sequences import mismatches

TOUCHES = {"read": "reads what arrives", "written": "changes the buffer", "freed": "frees the buffer"}
SHOWN = 10
"""Most violations of one rule that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Size of what was checked, and violations of rules."""

    ranks: int
    operations: int
    """Operations of all ranks."""
    groups: int
    programs: int
    """Distinct traces."""
    violations: tuple[Violation, ...]

    @property
    def sentence(self) -> str:
        """The answer in one line."""
        size = f"{self.ranks} ranks, {self.operations} operations"
        if not self.violations:
            return f"no deadlock, no mismatch: {size}"
        return f"{len(self.violations)} violation{'s' if len(self.violations) > 1 else ''}: {size}"


def check(world: Sequence[RankTrace]) -> CheckReport:
    """Check groups and messages, then deadlocks, then buffers.

    Deadlocks are searched only where all operations have their partners. One that needs no loading of kernels is shown
    before one that does.
    """
    violations = list(islice(mismatches(world), SHOWN))
    if not violations:
        violations = list(deadlocks(world, "first"))  # has all the rules of "none"
        violations = (violations and list(deadlocks(world, "none"))) or violations
    violations += islice(hazards(world), SHOWN)
    return CheckReport(
        ranks=len(world),
        operations=sum(len(rank_trace.trace.operations) for rank_trace in world),
        groups=len({communicator.name for rank_trace in world for communicator in rank_trace.communicators}),
        programs=len({id(rank_trace.trace) for rank_trace in world}),
        violations=tuple(violations),
    )


def hazards(world: Sequence[RankTrace]) -> Iterator[Violation]:
    """Yield buffers that local work touches before their operation was waited for.

    What an operation receives must not be read or changed, what it sends must not be changed, and neither may be freed:
    the allocator would give the memory to a kernel that runs before the operation has ended. Each distinct trace is
    checked on the first rank that has it.
    """
    for rank_trace in {id(rank_trace.trace): rank_trace for rank_trace in reversed(world)}.values():
        yield from _rank_hazards(rank_trace)


def _rank_hazards(rank_trace: RankTrace) -> Iterator[Violation]:
    pending: set[int] = set()
    reported: set[int] = set()
    for event in rank_trace.trace.events:
        if isinstance(event, Start):
            pending |= set(event.operations)
        elif isinstance(event, WaitEvent):
            pending.discard(event.operation)
        elif isinstance(event, Touch) and event.operation in pending - reported:
            reported.add(event.operation)
            yield Violation(
                rule="buffer",
                text=f"rank {rank_trace.rank} {TOUCHES[event.what]} of an operation before it was waited for: "
                f"{event.where}; the operation is the {rank_trace.describe(event.operation)}",
            )
    for number in sorted(pending - reported):
        yield Violation(rule="buffer", text=f"rank {rank_trace.rank} never waits for the {rank_trace.describe(number)}")
        return
