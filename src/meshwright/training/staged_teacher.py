"""A teacher beside a student whose layers are a pipeline's stages.

Its own stages make the forward passes of all micro-batches of a step before the student's begin. What they leave at the
teacher's head waits on the last rank, where the student's loss is made: hidden states of every micro-batch, and the
matrix. So neither model waits for the other's schedule, and memory grows by one row of hidden states per token.

Letters: N tokens of a micro-batch, D width of the teacher, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.kernels.linear_divergence import DistillationLoss, Divergence, TeacherHead
from meshwright.model.predictions import Predictions
from meshwright.parallel import Engine
from meshwright.training.batches import Batch
from meshwright.training.step import EVALUATION, MicroPass


class RecordedHeads:
    """In place of an objective: hidden states at the head are kept, on the last stage."""

    by_position = True
    figures = ()

    def __init__(self, *, copies: bool) -> None:
        self.copies = copies
        """Whether the matrix is gathered, and soon gone."""
        self.weight: Tensor | None = None
        self.states: dict[int, Tensor] = {}
        """(N, D) by the identity of a batch."""

    def count(self, batch: Batch) -> float:
        """Nothing is divided."""
        return 1.0

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Zero."""
        head = predictions.head()
        if self.weight is None:
            self.weight = head.weight.clone() if self.copies else head.weight
        self.states[id(batch)] = head.x
        return torch.zeros((), device=batch.tokens.device)


class StagedTeacher:
    """As OnlineTeacher, in stages."""

    def __init__(self, engine: Engine, shared: int = 0) -> None:
        self.engine, self.shared = engine, shared
        self._waiting: dict[int, Tensor] = {}
        self._weight: Tensor | None = None

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Forward passes of all micro-batches; all ranks together."""
        recorded = RecordedHeads(copies=self.engine.mesh.layout.zero == 3)
        self.engine.evaluate([MicroPass(batch, EVALUATION, recorded) for batch in batches])
        self.engine.reshard()  # no backward pass comes, which would
        self._weight = recorded.weight
        self._waiting = {id(batch): recorded.states[id(batch)] for batch in batches} if recorded.states else {}

    def against(
        self, predictions: Predictions, batch: Batch, scale: Tensor | None, form: Divergence
    ) -> DistillationLoss:  # fmt: skip
        """As AsksTeacher, on the last stage. Stages that warm up ask about batches of their own: of those nothing is
        known."""
        assert self._weight is not None, "the last stage of both is on one rank"
        states = self._waiting.pop(id(batch), None)
        if states is None:
            states = self._weight.new_zeros(batch.targets.numel(), self._weight.shape[1])
        head = TeacherHead(states, self._weight)
        if not self._waiting:
            self._weight = None if self.engine.mesh.layout.zero == 3 else self._weight
        return predictions.divergence(head, batch.targets, scale, form, self.shared)
