"""Held-out loss by who says it: of each row and role, the loss summed and the targets that count.

Letters: B rows, S positions, R roles.
"""

from collections.abc import Hashable
from typing import final

import torch
from torch import Tensor

from meshwright.data.rendering import ROLES
from meshwright.model.predictions import Predictions
from meshwright.training.batches import Batch, forms
from meshwright.training.step import EVALUATION, MicroPass


@final
class RowLoss:
    """Cross-entropy as an objective, summed; what it found is kept in `found`, (2, B, R) fp32: nats, and targets."""

    by_position = True
    figures: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.found: Tensor | None = None

    def count(self, batch: Batch) -> float:
        """Valid targets."""
        return batch.valid

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """In nats."""
        nats = -predictions.log_probabilities(batch.targets)
        said = batch.more.get("roles", torch.zeros_like(batch.targets))
        both = torch.stack((nats, (batch.targets >= 0).float()))
        # A sum for each role: adding to places at random would be in no fixed order on a GPU.
        self.found = torch.stack([both.where(said == role, 0.0).sum(2) for role in range(len(ROLES))], dim=2)
        return nats.sum()


class RowPass(MicroPass):
    """A micro-batch on its way through the stages; only the last stage finds something."""

    def __init__(self, batch: Batch) -> None:
        self._kept = RowLoss()
        super().__init__(batch, EVALUATION, self._kept)

    def forms(self) -> dict[Hashable, MicroPass]:
        """As MicroPass."""
        return {(*self.size, packed): RowPass(one) for packed, one in forms(self.batch).items()}

    def __copy__(self) -> "RowPass":
        """What a copy finds, as a warm-up does, is its own."""
        return RowPass(self.batch)

    @property
    def found(self) -> Tensor:
        """(2, B, R) fp32, of the stages that this rank has."""
        rows, device = len(self.batch.tokens), self.batch.tokens.device
        return torch.zeros(2, rows, len(ROLES), device=device) if self._kept.found is None else self._kept.found
