"""Counts of every collective of a mesh, by axis and kind, with the bytes that this rank sends.

Bytes are those of ring algorithms. With n ranks, an all-reduce sends 2 (n-1)/n of the tensor; all-gather and
reduce-scatter send (n-1)/n of the whole one. An all-to-all sends the rows for others, and a send its tensor. Groups of
one rank send nothing and are not counted. The cost of counting is in docs/parallel.md.
"""

from collections.abc import Mapping

Counts = Mapping[tuple[str, str], tuple[int, int]]
"""(axis, collective) -> (calls, bytes sent by this rank)."""


class Traffic:
    """The counts of one rank since the start, and the last collective it began, for a watchdog.

    Written by the thread that trains. Another thread may read `last` and `calls_begun` at any time.
    """

    __slots__ = ("_counts", "_last", "calls_begun")

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._last: tuple[str, str] | None = None
        self.calls_begun = 0
        """Number of collectives, sends and receives begun since the start."""

    def tell(self, axis: str, collective: str, sent_bytes: int) -> None:
        """Report that a collective is about to begin, in which this rank sends `sent_bytes`."""
        self.begin(axis, collective)
        self.add(axis, collective, sent_bytes)

    def begin(self, axis: str, collective: str) -> None:
        """Report the start of something that is counted elsewhere: a receive is counted at its sender."""
        self._last = (axis, collective)
        self.calls_begun += 1

    def add(self, axis: str, collective: str, sent_bytes: int) -> None:
        """Count one more call, and its bytes."""
        count = self._counts.get((axis, collective))
        if count is None:
            self._counts[axis, collective] = [1, sent_bytes]
        else:
            count[0] += 1
            count[1] += sent_bytes

    @property
    def last(self) -> str:
        """The last collective that was begun, as `all_reduce on tp`. Empty = none so far."""
        return f"{self._last[1]} on {self._last[0]}" if self._last else ""

    def snapshot(self) -> Counts:
        """Return the counts as they are now."""
        return {key: (calls, sent) for key, (calls, sent) in self._counts.items()}

    def restore(self, before: Counts) -> None:
        """Set the counts back to a snapshot: what was sent since does not belong to a step."""
        self._counts = {key: [calls, sent] for key, (calls, sent) in before.items()}

    def since(self, before: Counts) -> Counts:
        """Return what was counted after a snapshot."""
        more = {}
        for key, (calls, sent) in self.snapshot().items():
            calls_before, sent_before = before.get(key, (0, 0))
            if calls > calls_before:
                more[key] = (calls - calls_before, sent - sent_before)
        return more
