"""Head and distillation loss in one, without the whole logits of student or teacher.

    loss of a row = (1 - w) T^2 D(t, s) + w CE,   s = softmax(x W^T / T), t = softmax(x_t W_t^T / T)

    D, beta = 0    KL(t || s), forward             d D / d logits = (s - t) / T
       beta = 1    KL(s || t), reverse             s (log s/t - D) / T
       between     beta KL(t || m) + (1 - beta) KL(s || m),  m = beta t + (1 - beta) s
                                                   (1 - beta) s (log s/m - KL(s || m)) / T

CE is the cross-entropy of the target at T = 1. T^2 keeps gradients of one size (Hinton et al. 2015, arXiv:1503.02531,
section 2); the generalized divergence is that of GKD (Agarwal et al. 2023, arXiv:2306.13649, eq. 1). A teacher is its
hidden states and head, or what was kept of it: the K largest log-probabilities of a row, and that of all the rest.

One loop over chunks of rows makes loss and gradients, as in cross_entropy.py. Of a vocabulary in parts, chunks are
combined by two reductions of numbers of rows; between forward and reverse there is a third.

Letters: N rows, R rows of a chunk, D and E widths of student and teacher, V vocabulary, K kept log-probabilities.
"""

from dataclasses import dataclass, field
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.cross_entropy import IGNORED, Vocabulary, chunk_rows, counted_rows
from meshwright.kernels.divergence_rows import (
    FORWARD,
    DistillationLoss,
    Divergence,
    KnownTop,
    RowDivergence,
    Teacher,
    TeacherHead,
)
from meshwright.kernels.head_matrix import HeadMatrix, scaled_gradient
from meshwright.kernels.linear import product_dtype
from meshwright.kernels.target import kind
from meshwright.spec.purpose import takes

BUFFERS = 5
"""Buffers of (R, V) fp32 that a chunk has at most: logits and probabilities of both, and their gradient."""


@takes("logits")
def linear_divergence_reference(
    x: Tensor, weight: Tensor, teacher: Teacher, targets: Tensor, scale: Tensor | None = None,
    form: Divergence = FORWARD,
) -> DistillationLoss:  # fmt: skip
    """Return the loss for x (N, D), weight (V, D) and targets (N,) with -100 = ignored, times scale ()."""
    logits, valid = F.linear(x, weight).float(), targets != IGNORED
    ours = (logits / form.temperature).log_softmax(-1)
    if isinstance(teacher, KnownTop):
        tail = ours.scatter(1, teacher.ids, -torch.inf).logsumexp(1, keepdim=True)
        ours, theirs = torch.cat((ours.gather(1, teacher.ids), tail), 1), teacher.normal.to(ours.dtype)
    else:
        theirs = (F.linear(teacher.x, teacher.weight).float() / form.temperature).log_softmax(-1)
    each = divergence_of(ours, theirs.detach(), form.beta) * form.temperature**2
    hard = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    soft, hard = (each * valid).sum(), hard.sum()
    loss = (1 - form.hard) * soft + form.hard * hard
    return DistillationLoss(loss if scale is None else loss * scale, torch.stack((soft, hard)).detach())


def divergence_of(ours: Tensor, theirs: Tensor, beta: float) -> Tensor:
    """Return D of each row (N,), from log-probabilities (N, V) of student and teacher."""
    if beta == 0:
        return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(1)
    if beta == 1:
        return F.kl_div(theirs, ours, reduction="none", log_target=True).sum(1)
    mixed = torch.logaddexp(ours + log(1 - beta), theirs + log(beta))
    parts = [F.kl_div(mixed, logs, reduction="none", log_target=True).sum(1) for logs in (theirs, ours)]
    return beta * parts[0] + (1 - beta) * parts[1]


@dataclass(slots=True)
class _DivergenceChunks:
    """Loop over chunks of x (N, D), with optional gradients of the sum of factor x loss."""

    x: Tensor
    weight: Tensor
    teacher: Teacher
    targets: Tensor
    vocabulary: Vocabulary | None
    form: Divergence
    x_gradient: Tensor | None = None
    weight_gradient: Tensor | None = None
    """Gradient in fp32, whatever the dtype of the weight."""
    head: HeadMatrix = field(init=False)
    theirs: HeadMatrix | None = field(init=False, default=None)
    """Head of a loaded teacher."""

    def __post_init__(self) -> None:
        self.head = HeadMatrix.padded(self.weight, product_dtype(self.weight))
        if isinstance(self.teacher, TeacherHead):
            self.theirs = HeadMatrix.padded(self.teacher.weight, product_dtype(self.teacher.weight))

    def run(self, scale: Tensor | None, of_x: bool, of_weight: bool) -> Tensor:
        """Return sums (2,) fp32 over valid rows: T^2 D and the cross-entropy."""
        self.x_gradient = torch.empty_like(self.x) if of_x else None
        self.weight_gradient = self.head.empty_gradient(len(self.x)) if of_weight else None
        columns = self.vocabulary.most if self.vocabulary else len(self.weight)
        rows = chunk_rows(len(self.x), BUFFERS * columns, kind(self.x))
        total = torch.zeros(2, dtype=torch.float32, device=self.x.device)
        for start in range(0, len(self.x), rows):
            chunk = slice(start, start + rows)
            valid = self.targets[chunk] != IGNORED
            total += self._chunk(chunk, valid, counted_rows(valid, self.vocabulary), scale)
        return total

    def _chunk(self, chunk: slice, valid: Tensor, counted: Tensor | None, scale: Tensor | None) -> Tensor:
        def rows_of_chunk(tensor: Tensor) -> Tensor:
            return tensor[chunk] if counted is None else tensor[chunk][counted]

        inputs, targets = rows_of_chunk(self.x).to(product_dtype(self.weight)), rows_of_chunk(self.targets)
        valid = valid if counted is None else valid[counted]
        by_row = RowDivergence(self.vocabulary, self.form)
        logits = self.head.logits(inputs).float()
        factor = valid.float() if scale is None else valid * scale.float()
        if isinstance(self.teacher, TeacherHead):
            assert self.theirs is not None
            teacher_logits = self.theirs.logits(
                rows_of_chunk(self.teacher.x).to(product_dtype(self.teacher.weight))
            ).float()
            losses = by_row.losses_of_logits(logits, teacher_logits, targets, factor)
            del teacher_logits
        else:
            losses = by_row.losses_of_known(logits, KnownTop(*map(rows_of_chunk, self.teacher)), targets, factor)
        del logits
        if self.x_gradient is not None or self.weight_gradient is not None:
            self._add_gradients(self.head.padded_gradients(losses.gradient, inputs.dtype), inputs, chunk, counted)
        return torch.stack([(part * valid).sum() for part in (losses.soft, losses.hard)])

    def _add_gradients(self, logit_gradients: Tensor, inputs: Tensor, chunk: slice, counted: Tensor | None) -> None:
        """Add a chunk to the gradients of x and weight, from the padded gradients of its logits."""
        if self.x_gradient is not None:
            gradient = self.head.input_gradient(logit_gradients).to(self.x_gradient.dtype)
            if counted is None:
                self.x_gradient[chunk] = gradient
            else:
                self.x_gradient[chunk].zero_().index_copy_(0, counted, gradient)
        if self.weight_gradient is not None:
            self.head.add_gradient(self.weight_gradient, logit_gradients, inputs, first=not chunk.start)


class _LinearDivergence(torch.autograd.Function):
    """Distillation loss that computes both gradients in its forward pass. The backward pass can run once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, teacher: Teacher, targets: Tensor, scale: Tensor | None,
        vocabulary: Vocabulary | None, form: Divergence,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        chunks = _DivergenceChunks(x, weight, teacher, targets, vocabulary, form)
        parts = chunks.run(scale, *ctx.needs_input_grad[:2])
        ctx.x_gradient, ctx.weight_gradient, ctx.dtype = chunks.x_gradient, chunks.weight_gradient, weight.dtype
        loss = (1 - form.hard) * parts[0] + form.hard * parts[1]
        ctx.mark_non_differentiable(parts)
        return loss if scale is None else loss * scale, parts

    @staticmethod
    @takes("logits")
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        if ctx.dtype is None:
            raise RuntimeError("linear_divergence keeps its gradients for one backward pass only")
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("linear_divergence has no second derivative: its gradients were made without a graph")
        x_gradient, weight_gradient = ctx.x_gradient, ctx.weight_gradient
        if x_gradient is not None:
            x_gradient.mul_(gradient)
        if weight_gradient is not None:
            weight_gradient = scaled_gradient(weight_gradient, gradient, ctx.dtype)
        ctx.x_gradient = ctx.weight_gradient = ctx.dtype = None
        return x_gradient, weight_gradient, *(None,) * 5


@takes("logits")
def linear_divergence(
    x: Tensor, weight: Tensor, teacher: Teacher, targets: Tensor, scale: Tensor | None = None,
    vocabulary: Vocabulary | None = None, form: Divergence = FORWARD,
) -> DistillationLoss:  # fmt: skip
    """Compute the loss as the reference does. One backward pass, and no gradient of teacher and scale.

    With a vocabulary, `weight` and the teacher's head are parts of the heads, cut alike. The loss is that of all parts,
    and the gradient of x this part's share.
    """
    if not torch.is_grad_enabled():  # an autograd function cannot see this, and would compute gradients for nothing
        x, weight = x.detach(), weight.detach()
    teacher = type(teacher)(*(tensor.detach() for tensor in teacher))
    sums = _LinearDivergence.apply(x, weight, teacher, targets, scale, vocabulary, form)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return DistillationLoss(*sums)
