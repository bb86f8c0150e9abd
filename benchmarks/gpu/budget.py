"""Minutes that a run may take, and what had to be left out."""

import statistics
import time
from collections.abc import Callable


class Budget:
    """Rows ask before they start; what a kind of row took so far corrects what it is thought to take."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.end_s = clock, clock() + 60 * minutes
        self.left_out: list[str] = []
        self._off: dict[str, list[float]] = {}

    @property
    def left_s(self) -> float:
        """Seconds; negative once it is over."""
        return self.end_s - self.clock()

    def late(self) -> bool:
        """Whether the time is over."""
        return self.left_s <= 0

    def has(self, kind: str, name: str, expected_s: float) -> bool:
        """Whether a row of a kind, thought to take so long, still fits; if not it is noted as left out."""
        factor = statistics.median(self._off.get(kind) or [1.0])
        if expected_s * factor <= self.left_s:
            return True
        self.left_out.append(name)
        return False

    def took(self, kind: str, expected_s: float, seconds: float) -> None:
        """What a row took."""
        self._off.setdefault(kind, []).append(seconds / expected_s)
