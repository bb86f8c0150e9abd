"""What a model says of next tokens.

Letters: B batch, S sequence, D hidden, V vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from meshwright.kernels import Kernels
from meshwright.kernels.divergence_rows import FORWARD, DistillationLoss, Divergence, KnownTop, TeacherHead
from meshwright.model.seams import Seams

Made = TypeVar("Made")


class HasHead(Protocol):
    """A model."""

    @property
    def kernels(self) -> Kernels:
        """Its products and losses."""

    @property
    def seams(self) -> Seams:
        """What stands in for them where the vocabulary is shared among ranks."""

    def at_head(self, x: Tensor, use: Callable[[Tensor, Tensor], Made]) -> Made:
        """use(x (N, D), weight (V, D)), where gradients of both are counted."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a model says of next tokens, asked for without the whole logits. `_x` (B, S, D) is at its head: the
    gradient of anything else made of it would be summed over tensor-parallel ranks."""

    model: HasHead
    _x: Tensor

    def cross_entropy(self, targets: Tensor, scale: Tensor | None = None) -> Tensor:
        """-log p summed () fp32 in nats over targets (B, S) that are not -100, times scale, () or (B, S)."""
        model = self.model
        made = model.seams.loss or model.kernels.linear_cross_entropy
        factor = scale.flatten() if scale is not None and scale.dim() else scale
        return self._at_head(lambda x, weight: made(x, weight, targets.flatten(), factor))

    def log_probabilities(self, targets: Tensor) -> Tensor:
        """log p (B, S) fp32 in nats of targets (B, S); 0 where they are -100."""
        made = self.model.seams.log_probabilities or self.model.kernels.linear_log_probabilities
        return self._at_head(lambda x, weight: made(x, weight, targets.flatten())).view(targets.shape)

    def divergence(
        self, teacher: "Predictions | TeacherHead | KnownTop", targets: Tensor, scale: Tensor | None = None,
        form: Divergence = FORWARD, shared: int = 0,
    ) -> DistillationLoss:  # fmt: skip
        """Distillation loss summed over targets (B, S) that are not -100, times scale (): against the predictions of a
        teacher, which learns nothing, or what it has at its head, or what was kept of them. `shared`: both know the
        first so many tokens of their vocabularies alike; 0 = all."""
        made = self.model.seams.divergence or self.model.kernels.linear_divergence
        learns, found = torch.is_grad_enabled(), list[DistillationLoss]()

        def against(theirs: KnownTop | TeacherHead) -> Tensor:
            with torch.set_grad_enabled(learns):
                use = partial(made, teacher=theirs, targets=targets.flatten(), scale=scale, form=form)
                found.append(self._at_head(lambda x, weight: use(x, weight[: shared or None])))
            return targets.new_zeros(())  # nothing that could be differentiated leaves a teacher's head

        if isinstance(teacher, KnownTop):
            against(teacher)
        elif isinstance(teacher, TeacherHead):
            against(TeacherHead(teacher.x, teacher.weight[: shared or None]))
        else:
            with torch.no_grad():
                teacher._at_head(lambda x, weight: against(TeacherHead(x, weight[: shared or None])))
        return found[0]

    def head(self) -> TeacherHead:
        """Hidden states (B S, D) and matrix (V, D) of the head, of this rank's part of the vocabulary. A matrix that is
        gathered is whole as long as the stage runs."""
        return self._at_head(lambda x, weight: TeacherHead(x.detach(), weight.detach()))

    def top(self, number: int, temperature: float, shared: int = 0) -> KnownTop:
        """The likeliest next tokens (B, S, K) of each position at a temperature, and log-probabilities (B, S, K + 1):
        theirs, and that of all others together."""
        made = self.model.seams.top or self.model.kernels.linear_top
        use = partial(made, number=number, temperature=temperature)
        found = self._at_head(lambda x, weight: use(x, weight[: shared or None]))
        return KnownTop(*(one.view(*self._x.shape[:2], -1) for one in found))

    def whole_sums(self, sums: Tensor) -> Tensor:
        """Sums over the positions that are here -> over whole sequences, the same on each rank that has a part of them
        (cp). Each of these must then add the same to the step's loss: its share of it, as `Objective.count` counts."""
        return self.model.seams.whole_sums(sums)

    def logits_at(self, places: Tensor) -> Tensor:
        """Logits (B, V) fp32 at one position (B,) of each row; of this rank's part of the vocabulary where it is
        shared."""
        first = torch.arange(len(places), device=places.device) * self._x.shape[1]
        linear = self.model.kernels.linear
        return self._at_head(lambda x, weight: linear(x[first + places], weight).float())

    def _at_head(self, use: Callable[[Tensor, Tensor], Made]) -> Made:
        return self.model.at_head(self._x.flatten(0, 1), use)
