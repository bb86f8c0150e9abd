"""An optimizer that keeps the gradients it was given, for models that are compared."""

from typing import Any

from torch import Tensor

from meshwright.parallel.data import local
from meshwright.training.optimizer import Optimizer


class RecordingOptimizer(Optimizer):
    """Keeps a copy of every gradient before it is used."""

    gradients: list[dict[str, Tensor]]
    """Of each step, by name."""

    def step(self, rate: float, **options: Any) -> None:
        """As AdamW."""
        found = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        self.gradients = [*getattr(self, "gradients", []), {n: local(g).clone() for n, g in found.items()}]
        super().step(rate, **options)
