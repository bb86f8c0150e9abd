"""Distillation as an objective: a student learns the distributions of a teacher, token by token.

The loss is the divergence of kernels/loss/linear_divergence.py, summed over valid targets. The teacher is a model
beside the student (teacher.py), or stored log-probabilities (teacher_targets.py) in `Batch.more`.

Letters: B rows, S positions of this rank, K stored log-probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshwright.kernels.loss.linear_divergence import DistillationLoss, Divergence, KnownTop
from meshwright.model.predictions import Predictions
from meshwright.parallel import Engine
from meshwright.spec import Recipe
from meshwright.spec.recipe.recipe import TAUGHT
from meshwright.training.step.batches import Batch

LIKELIEST, LOGS = "teacher likeliest", "teacher log-probabilities"
"""Names in `Batch.more` of the teacher's stored distributions.

The likeliest tokens are (B, S, K). Their log-probabilities are (B, S, K + 1), that of all other tokens last.
"""


class AsksTeacher(Protocol):
    """A teacher model in memory."""

    @property
    def engine(self) -> Engine:
        """The teacher over the ranks."""

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Prepare the passes of a step over these micro-batches. All ranks call this together."""

    def against(
        self, predictions: Predictions, batch: Batch, scale: Tensor | None, form: Divergence
    ) -> DistillationLoss:  # fmt: skip
        """Return the loss of a student's predictions of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """The mean divergence over valid targets, mixed with their cross-entropy."""

    form: Divergence
    teacher: AsksTeacher | None = None
    """None = batches carry stored log-probabilities."""
    shared: int = 0
    """Tokens that both models know, when vocabularies are padded differently. 0 = all."""
    by_position = True
    figures = TAUGHT

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Let a teacher in memory prepare the step."""
        if self.teacher is not None:
            self.teacher.begin_step(batches)

    def count(self, batch: Batch) -> float:
        """Return the number of valid targets."""
        return batch.valid

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Return (3,) fp32: the sum in nats, then divergence and cross-entropy alone."""
        if self.teacher is None:
            ids, logs = (batch.more[name].flatten(0, 1) for name in (LIKELIEST, LOGS))
            divergence = predictions.divergence(
                KnownTop(ids.long(), logs), batch.targets, scale, self.form, self.shared
            )
        else:
            divergence = self.teacher.against(predictions, batch, scale, self.form)
        return torch.cat((divergence.loss.reshape(1), divergence.parts))


def divergence_of(recipe: Recipe) -> Divergence:
    """Return the divergence that a recipe names."""
    return Divergence(
        beta=recipe.distillation_beta, temperature=recipe.distillation_temperature, hard=recipe.distillation_hard
    )
