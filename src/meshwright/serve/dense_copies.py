"""Which growing answers have their keys and values beside the blocks once more, in one piece each.

To gather blocks costs more than attention over them. So an answer that grows has a row of a dense copy, to which each
step adds one position, and its blocks are gathered once: when it begins, or outgrows the copy's length. Copies have as
many keys as calls of attention have; each is a table of rows, in which those of ended answers are taken again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.serve.cached_sequence import CachedSequence


@dataclass(frozen=True, slots=True)
class CopiedRow:
    """An answer's row in a copy."""

    sequence: CachedSequence
    row: int
    position: int
    """That the step adds."""
    new: bool
    """Whether its blocks are gathered first."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What a step does with one copy."""

    keys: int
    """T, keys of each row."""
    room: int
    """Rows that there is memory for; 0 = none is used any more."""
    rows: int
    """Rows that are attended to; some may be empty."""
    used: list[CopiedRow]
    """In order of rows."""


@dataclass(slots=True)
class _Copy:
    room: int = 0
    owners: list[tuple[CachedSequence, int, int] | None] = field(default_factory=list)
    """Of each row: whose it is, the position that comes next, and how often that sequence was preempted."""


class DenseCopies:
    """Rows of all copies, within a number of bytes."""

    def __init__(self, position_bytes: int, most_bytes: int) -> None:
        """`position_bytes` of a position in all layers that see everything; 0 where none does."""
        self._left = most_bytes // position_bytes if position_bytes else 0
        """Positions that there is memory for yet."""
        self._copies: dict[int, _Copy] = {}

    def plan(self, growing: Sequence[tuple[CachedSequence, int, int]]) -> list[CopyPlan]:
        """Rows for sequences of which a step computes one position, that, and its number of keys. Those for whom there
        is no memory have none."""
        wanted: dict[int, dict[CachedSequence, int]] = {}
        for sequence, position, keys in growing:
            wanted.setdefault(keys, {})[sequence] = position
        return [self._of(keys, wanted.get(keys, {})) for keys in sorted({*wanted, *self._copies})]

    def _of(self, keys: int, sequences: Mapping[CachedSequence, int]) -> CopyPlan:
        copy = self._copies.setdefault(keys, _Copy())
        places = self._kept(copy, sequences)
        free = [row for row, owner in enumerate(copy.owners) if owner is None][::-1]
        used = []
        for sequence, position in sequences.items():
            row = places.get(sequence)
            if row is None and (row := free.pop() if free else self._more(copy, keys)) is None:
                continue
            copy.owners[row] = sequence, position + 1, sequence.preemptions
            used.append(CopiedRow(sequence, row, position, sequence not in places))
        if not copy.owners:
            self._left += copy.room * keys
            del self._copies[keys]
            return CopyPlan(keys, 0, 0, [])
        return CopyPlan(keys, copy.room, len(copy.owners), sorted(used, key=lambda one: one.row))

    def _kept(self, copy: _Copy, sequences: Mapping[CachedSequence, int]) -> dict[CachedSequence, int]:
        """Rows that go on; the others become free, and where less than half go on, all do."""
        places = {}
        for row, owner in enumerate(copy.owners):
            if owner is not None:
                sequence, position, preemptions = owner
                if sequences.get(sequence) == position and sequence.preemptions == preemptions:
                    places[sequence] = row
                else:
                    copy.owners[row] = None
        if 2 * len(places) < len(copy.owners):
            copy.owners.clear()
            return {}
        while copy.owners and copy.owners[-1] is None:
            copy.owners.pop()
        return places

    def _more(self, copy: _Copy, keys: int) -> int | None:
        """One more row; None where memory is used up."""
        if len(copy.owners) == copy.room:
            more = max(1, copy.room)
            if more * keys > self._left:
                return None
            copy.room += more
            self._left -= more * keys
        copy.owners.append(None)
        return len(copy.owners) - 1
