"""All rules over the traces of a world."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from meshwright.observe.check.buffers import hazards
from meshwright.observe.check.deadlock import deadlocks
from meshwright.observe.check.events import RankTrace, Violation
from meshwright.observe.check.sequences import mismatches

SHOWN = 10
"""Violations of a rule that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was checked, and what breaks a rule."""

    ranks: int
    operations: int
    """Of all ranks."""
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


def check(world: Sequence[RankTrace]) -> Checked:
    """Groups and messages first. Deadlocks are looked for only where all operations have their partners. One that needs
    no loading of kernels is shown before one that does."""
    found = list(islice(mismatches(world), SHOWN))
    if not found:
        found = list(deadlocks(world, "first"))  # has all the rules of "none"
        found = (found and list(deadlocks(world, "none"))) or found
    found += islice(hazards(world), SHOWN)
    return Checked(
        ranks=len(world),
        operations=sum(len(one.trace.operations) for one in world),
        groups=len({communicator.name for one in world for communicator in one.communicators}),
        programs=len({id(one.trace) for one in world}),
        violations=tuple(found),
    )
