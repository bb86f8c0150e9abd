"""What a rank sends: every collective of a mesh, counted by axis and kind.

Bytes are those that this rank sends, as rings do: with n ranks, all-reduce 2 (n-1)/n of the tensor, all-gather and
reduce-scatter (n-1)/n of the whole one; all-to-all the rows for others; sends their sender. Groups
of one rank send nothing and are not counted. What counting costs: docs/parallel.md.
"""

from collections.abc import Mapping

Counts = Mapping[tuple[str, str], tuple[int, int]]
"""(axis, collective) -> (calls, bytes sent by this rank)."""


class Traffic:
    """The counts of one rank since the start; also what it began last, for a watchdog.

    Written by the thread that trains; another one may read `last` and `calls_begun` at any time.
    """

    __slots__ = ("_counts", "_last", "calls_begun")

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._last: tuple[str, str] | None = None
        self.calls_begun = 0
        """Collectives, sends and receives begun since the start."""

    def tell(self, axis: str, collective: str, sent_bytes: int) -> None:
        """A collective is about to begin, in which this rank sends so much."""
        self.begin(axis, collective)
        self.add(axis, collective, sent_bytes)

    def begin(self, axis: str, collective: str) -> None:
        """Something begins that is counted elsewhere: a receive at its sender."""
        self._last = (axis, collective)
        self.calls_begun += 1

    def add(self, axis: str, collective: str, sent_bytes: int) -> None:
        """One call more, and its bytes."""
        found = self._counts.get((axis, collective))
        if found is None:
            self._counts[axis, collective] = [1, sent_bytes]
        else:
            found[0] += 1
            found[1] += sent_bytes

    @property
    def last(self) -> str:
        """The last that was begun, as `all_reduce on tp`; empty before the first."""
        return f"{self._last[1]} on {self._last[0]}" if self._last else ""

    def snapshot(self) -> Counts:
        """The counts as they are now."""
        return {key: (calls, sent) for key, (calls, sent) in self._counts.items()}

    def restore(self, before: Counts) -> None:
        """Take the counts back to a snapshot: what was sent since does not belong to a step."""
        self._counts = {key: [calls, sent] for key, (calls, sent) in before.items()}

    def since(self, before: Counts) -> Counts:
        """What was counted after a snapshot."""
        more = {}
        for key, (calls, sent) in self.snapshot().items():
            calls_before, sent_before = before.get(key, (0, 0))
            if calls > calls_before:
                more[key] = (calls - calls_before, sent - sent_before)
        return more
