"""Distillation as an objective: a student learns the distributions of a teacher, token by token.

The loss is that of kernels/linear_divergence.py, summed over valid targets. The teacher is a model beside the student
(teacher.py), or what was kept of one (teacher_store.py) and lies in `Batch.more`.

Letters: B rows, S positions that are here, K kept log-probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshwright.kernels.linear_divergence import DistillationLoss, Divergence, KnownTop
from meshwright.model.predictions import Predictions
from meshwright.parallel import Engine
from meshwright.spec import Recipe
from meshwright.spec.objective_traits import TAUGHT
from meshwright.training.batches import Batch

LIKELIEST, LOGS = "teacher likeliest", "teacher log-probabilities"
"""Names in `Batch.more`: the teacher's likeliest tokens (B, S, K), and their log-probabilities with that of all others
together (B, S, K + 1)."""


class AsksTeacher(Protocol):
    """A teacher that is here."""

    @property
    def engine(self) -> Engine:
        """Its model over the ranks."""

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Before the passes of a step over these micro-batches; all ranks together."""

    def against(
        self, predictions: Predictions, batch: Batch, scale: Tensor | None, form: Divergence
    ) -> DistillationLoss:  # fmt: skip
        """The loss of a student's predictions of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """The mean divergence over valid targets, with their cross-entropy mixed in."""

    form: Divergence
    teacher: AsksTeacher | None = None
    """None: batches have what was kept of one."""
    shared: int = 0
    """Tokens that both know, where vocabularies are padded differently; 0 = all."""
    by_position = True
    figures = TAUGHT

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """As step.BeginsStep."""
        if self.teacher is not None:
            self.teacher.begin_step(batches)

    def count(self, batch: Batch) -> float:
        """Valid targets."""
        return batch.valid

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """(3,) fp32: the sum in nats, and of divergence and cross-entropy by themselves."""
        if self.teacher is None:
            kept = KnownTop(*(batch.more[name].flatten(0, 1) for name in (LIKELIEST, LOGS)))
            known = KnownTop(kept.ids.long(), kept.log_probabilities)
            found = predictions.divergence(known, batch.targets, scale, self.form, self.shared)
        else:
            found = self.teacher.against(predictions, batch, scale, self.form)
        return torch.cat((found.loss.reshape(1), found.parts))


def form_of(recipe: Recipe) -> Divergence:
    """The divergence that a recipe names."""
    return Divergence(
        beta=recipe.distillation_beta, temperature=recipe.distillation_temperature, hard=recipe.distillation_hard
    )
