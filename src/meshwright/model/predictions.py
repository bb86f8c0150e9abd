"""Predictions of next tokens, from which objectives are computed.

Letters: B batch, S sequence, D hidden, V vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from meshwright.kernels import Kernels
from meshwright.kernels.loss.linear_divergence import FORWARD, DistillationLoss, Divergence, KnownTop, TeacherHead
from meshwright.model.seams import Seams

Output = TypeVar("Output")


class HasHead(Protocol):
    """Model that ends in a head."""

    @property
    def kernels(self) -> Kernels:
        """Products and losses of the model."""

    @property
    def seams(self) -> Seams:
        """Replacements of these where ranks share the vocabulary."""

    def at_head(self, x: Tensor, use: Callable[[Tensor, Tensor], Output]) -> Output:
        """Return use(x (N, D), weight (V, D)) where gradients of both are counted."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of next tokens, available without the whole logits.

    `_x` (B, S, D) is the input of the head. The gradient of anything else computed from it would be summed over
    tensor-parallel ranks.
    """

    model: HasHead
    _x: Tensor

    def cross_entropy(self, targets: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the sum () fp32 of -log p in nats over targets (B, S) that are not -100, times scale, () or (B, S)."""
        model = self.model
        kernel = model.seams.loss or model.kernels.linear_cross_entropy
        factor = scale.flatten() if scale is not None and scale.dim() else scale
        return self._at_head(lambda x, weight: kernel(x, weight, targets.flatten(), factor))

    def log_probabilities(self, targets: Tensor) -> Tensor:
        """Return log p (B, S) fp32 in nats of targets (B, S), 0 where they are -100."""
        kernel = self.model.seams.log_probabilities or self.model.kernels.linear_log_probabilities
        return self._at_head(lambda x, weight: kernel(x, weight, targets.flatten())).view(targets.shape)

    def divergence(
        self, teacher: "Predictions | TeacherHead | KnownTop", targets: Tensor, scale: Tensor | None = None,
        form: Divergence = FORWARD, shared: int = 0,
    ) -> DistillationLoss:  # fmt: skip
        """Return the distillation loss summed over targets (B, S) that are not -100, times scale ().

        The teacher gets no gradient. It is given as predictions, as its head, or as its stored likeliest tokens.
        `shared` limits the comparison to the first tokens of both vocabularies. 0 = all.
        """
        kernel = self.model.seams.divergence or self.model.kernels.linear_divergence
        has_gradient, losses = torch.is_grad_enabled(), list[DistillationLoss]()

        def against(theirs: KnownTop | TeacherHead) -> Tensor:
            with torch.set_grad_enabled(has_gradient):
                use = partial(kernel, teacher=theirs, targets=targets.flatten(), scale=scale, form=form)
                losses.append(self._at_head(lambda x, weight: use(x, weight[: shared or None])))
            return targets.new_zeros(())  # nothing that could be differentiated leaves a teacher's head

        if isinstance(teacher, KnownTop):
            against(teacher)
        elif isinstance(teacher, TeacherHead):
            against(TeacherHead(teacher.x, teacher.weight[: shared or None]))
        else:
            with torch.no_grad():
                teacher._at_head(lambda x, weight: against(TeacherHead(x, weight[: shared or None])))
        return losses[0]

    def head(self) -> TeacherHead:
        """Return the head's hidden states (B S, D) and matrix (V, D), of this rank's part of the vocabulary.

        A gathered matrix stays whole while the stage runs.
        """
        return self._at_head(lambda x, weight: TeacherHead(x.detach(), weight.detach()))

    def top(self, number: int, temperature: float, shared: int = 0) -> KnownTop:
        """Return the likeliest next tokens (B, S, K) at a temperature.

        Log-probabilities are (B, S, K + 1): those of the K tokens, and that of all others together.
        """
        kernel = self.model.seams.top or self.model.kernels.linear_top
        use = partial(kernel, number=number, temperature=temperature)
        parts = self._at_head(lambda x, weight: use(x, weight[: shared or None]))
        return KnownTop(*(part.view(*self._x.shape[:2], -1) for part in parts))

    def whole_sums(self, sums: Tensor) -> Tensor:
        """Sum over whole sequences, from sums over the positions held here. Context-parallel ranks get the same sums.

        Each rank must then add the same to the loss of the step: its share, as `Objective.count` counts it.
        """
        return self.model.seams.whole_sums(sums)

    def logits_at(self, positions: Tensor) -> Tensor:
        """Return logits (B, V) fp32 at one position (B,) of each row, for this rank's part of the vocabulary."""
        first = torch.arange(len(positions), device=positions.device) * self._x.shape[1]
        linear = self.model.kernels.linear
        return self._at_head(lambda x, weight: linear(x[first + positions], weight).float())

    def _at_head(self, use: Callable[[Tensor, Tensor], Output]) -> Output:
        return self.model.at_head(self._x.flatten(0, 1), use)
