"""Choice of the growing answers that have a second, contiguous copy of their keys and values beside the blocks.

Gathering blocks costs more than attention over them. So a growing answer has a row of a dense copy, to which each step
adds one position. Its blocks are gathered once: when it begins, or outgrows the copy's length. Copies have as many keys
as calls of attention. Each is a table of rows, in which rows of ended answers are reused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.serving.engine.cache.cached_sequence import CachedSequence


@dataclass(frozen=True, slots=True)
class CopiedRow:
    """An answer's row in a copy."""

    sequence: CachedSequence
    row: int
    position: int
    """The position that the step adds."""
    new: bool
    """True when its blocks are gathered first."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Work of a step on one copy."""

    keys: int
    """T, keys of each row."""
    room: int
    """Rows with memory. 0 = the copy is no longer used."""
    rows: int
    """Rows that attention reads. Some may be empty."""
    used: list[CopiedRow]
    """In order of rows."""


@dataclass(slots=True)
class _Copy:
    room: int = 0
    owners: list[tuple[CachedSequence, int, int] | None] = field(default_factory=list)
    """(sequence, next position, preemptions so far) of each row."""


class DenseCopies:
    """Rows of all copies, within a number of bytes."""

    def __init__(self, position_bytes: int, most_bytes: int) -> None:
        """Take the bytes of a position in all layers without a window (0 = there are none), and the limit."""
        self._left = most_bytes // position_bytes if position_bytes else 0
        """Positions that still have memory."""
        self._copies: dict[int, _Copy] = {}

    def plan(self, growing: Sequence[tuple[CachedSequence, int, int]]) -> list[CopyPlan]:
        """Assign rows to (sequence, position to compute, number of keys).

        Sequences without memory for a row get none.
        """
        wanted: dict[int, dict[CachedSequence, int]] = {}
        for sequence, position, keys in growing:
            wanted.setdefault(keys, {})[sequence] = position
        return [self._plan_copy(keys, wanted.get(keys, {})) for keys in sorted({*wanted, *self._copies})]

    def _plan_copy(self, keys: int, sequences: Mapping[CachedSequence, int]) -> CopyPlan:
        copy = self._copies.setdefault(keys, _Copy())
        rows = self._surviving_rows(copy, sequences)
        free = [row for row, owner in enumerate(copy.owners) if owner is None][::-1]
        used = []
        for sequence, position in sequences.items():
            row = rows.get(sequence)
            if row is None and (row := free.pop() if free else self._add_row(copy, keys)) is None:
                continue
            copy.owners[row] = sequence, position + 1, sequence.preemptions
            used.append(CopiedRow(sequence, row, position, sequence not in rows))
        if not copy.owners:
            self._left += copy.room * keys
            del self._copies[keys]
            return CopyPlan(keys, 0, 0, [])
        return CopyPlan(keys, copy.room, len(copy.owners), sorted(used, key=lambda copied: copied.row))

    def _surviving_rows(self, copy: _Copy, sequences: Mapping[CachedSequence, int]) -> dict[CachedSequence, int]:
        """Return the rows that continue and free the others. If less than half continue, free all."""
        rows = {}
        for row, owner in enumerate(copy.owners):
            if owner is not None:
                sequence, position, preemptions = owner
                if sequences.get(sequence) == position and sequence.preemptions == preemptions:
                    rows[sequence] = row
                else:
                    copy.owners[row] = None
        if 2 * len(rows) < len(copy.owners):
            copy.owners.clear()
            return {}
        while copy.owners and copy.owners[-1] is None:
            copy.owners.pop()
        return rows

    def _add_row(self, copy: _Copy, keys: int) -> int | None:
        """Return one more row. None = memory is used up."""
        if len(copy.owners) == copy.room:
            more = max(1, copy.room)
            if more * keys > self._left:
                return None
            copy.room += more
            self._left -= more * keys
        copy.owners.append(None)
        return len(copy.owners) - 1
