"""What one rank's steps send and hold, for RUN/ledger.json: the keys `traffic` and `memory` of plan and dry run."""

from dataclasses import dataclass, field
from typing import Any

from meshwright.parallel.traffic import Counts
from meshwright.spec.ledger import Ledger
from meshwright.train.memory import memory
from meshwright.train.state import TrainState


@dataclass(slots=True)
class StepLedger:
    """Costs ten microseconds a step: traffic is the difference of two counts, memory is looked at in the first step."""

    state: TrainState
    step: int = 0
    """The step that `sent` is of, 0 = none yet."""
    sent: Counts = field(default_factory=dict)
    held: Ledger | None = None
    _before: Counts = field(default_factory=dict)

    def begin(self) -> None:
        """A step begins."""
        self._before = self.state.engine.mesh.traffic.snapshot()

    def look(self) -> None:
        """Gradients are there and reduced, the optimizer is about to update."""
        if self.held is None:
            self.held = memory(self.state.engine, self.state.optimizer, "update")

    def end(self, step: int) -> None:
        """The step has ended."""
        self.step, self.sent = step, self.state.engine.mesh.traffic.since(self._before)

    def document(self) -> dict[str, Any]:
        """As JSON: what this rank sends in the last step that was made, and holds at the optimizer's update."""
        return {
            "source": "measured",
            "rank": self.state.engine.mesh.rank,
            "step": self.step,
            "traffic": [
                {"axis": axis, "collective": collective, "bytes": sent, "calls": calls}
                for (axis, collective), (calls, sent) in sorted(self.sent.items())
            ],
            "memory": [{"kind": entry.what, "bytes": int(entry.quantity)} for entry in self.held or Ledger()],
        }
