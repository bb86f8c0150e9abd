"""Spikes of the loss: how a spike differs from noise, and what a checkpoint stores about it.

PaLM (arXiv:2204.02311, section 5.1) met about 20 spikes in spite of clipping. It went back to a checkpoint about 100
steps before each, skipped 200 to 500 batches, and saw no spike there again. The same batches did no harm to the weights
of another step, so it takes both: this data and this state.

A spike is SPIKE_STEPS steps in a row whose loss is above the median of the steps before by more than DEVIATIONS robust
deviations: 1.4826 times the median distance from the median, at least a hundredth of it. Neither one bad batch nor
noise is one, and a loss that falls makes the deviation larger. All ranks know the same losses, and so judge alike.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from meshwright.spec.errors import NonFiniteLoss
from meshwright.spec.recipe.recipe import SPIKE_STEPS

HISTORY_STEPS, ENOUGH_STEPS = 100, 50
"""Steps whose losses are compared, and the fewest that judge."""
DEVIATIONS, LEAST_DEVIATION = 6.0, 0.01
SAME_AS_SIGMA = 1.4826
"""Standard deviation of normal noise over its median distance from the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A reason to go back to an earlier checkpoint."""

    begun: int
    """Its first step."""
    words: str
    error: Callable[[], NonFiniteLoss] | None = None
    """Makes the error that ends the run if there is no checkpoint. None = the run may go on."""


@dataclass(slots=True)
class SpikeWatch:
    """Losses of earlier steps, and the row of high ones under way. Its fields are in checkpoints."""

    losses: list[float] = field(default_factory=list)
    row: int = 0
    begun: int = 0
    """First step of the row."""
    rollbacks: int = 0
    """Rollbacks of the run so far."""
    is_kept: bool = False
    """A checkpoint from before a spike that no rollback was left for is kept aside. Rank 0 knows."""

    @property
    def limit(self) -> float:
        """The largest loss that is no part of a spike."""
        if len(self.losses) < ENOUGH_STEPS:
            return math.inf
        middle = median(self.losses)
        deviation = SAME_AS_SIGMA * median(abs(loss - middle) for loss in self.losses)
        return middle + DEVIATIONS * max(deviation, LEAST_DEVIATION * abs(middle))

    def judge(self, step: int, loss: float) -> Spike | None:
        """Add the loss of a step. Returns the spike once it has lasted for SPIKE_STEPS steps."""
        if not math.isfinite(loss):  # skipped, or the end of the run
            return None
        limit = self.limit
        if loss <= limit:
            self.row, self.losses = 0, [*self.losses, loss][-HISTORY_STEPS:]
            return None
        self.row += 1
        if self.row == 1:
            self.begun = step
        words = f"the loss is {loss:.3f} and above {limit:.3f} since step {self.begun}"
        return Spike(begun=self.begun, words=words) if self.row >= SPIKE_STEPS else None

    def accept(self, *, is_kept: bool = False) -> None:
        """Take the loss as it is: later steps are compared with those from now on."""
        self.losses, self.row, self.is_kept = [], 0, self.is_kept or is_kept
