"""A published row beside what the planner says of it."""

from dataclasses import dataclass

from meshwright.planner.accuracy.published import PublishedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A row and what the planner says of it."""

    row: PublishedRow
    step_s: float
    part_value: float
    """Bytes (or share) of what the row's `part` is."""
    fits: bool
    seen: bool
    """A calibration was fitted on this row: it counts in no error."""

    @property
    def step_error(self) -> float | None:
        """Relative; None where the row gives no time."""
        return self.step_s / self.row.step_s - 1 if self.row.step_s and not self.seen else None

    @property
    def memory_error(self) -> float | None:
        """Relative; None where the row gives no memory."""
        return self.part_value / self.row.part_value - 1 if self.row.part_value else None
