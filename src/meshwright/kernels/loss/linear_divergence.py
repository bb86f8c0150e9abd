"""Head and distillation loss in one, without the full logits of student or teacher; and a teacher's likeliest tokens.

    loss of a row = (1 - w) T^2 D(t, s) + w CE,   s = softmax(x W^T / T), t = softmax(x_t W_t^T / T)

    D, beta = 0    KL(t || s), forward             d D / d logits = (s - t) / T
       beta = 1    KL(s || t), reverse             s (log s/t - D) / T
       between     beta KL(t || m) + (1 - beta) KL(s || m),  m = beta t + (1 - beta) s
                                                   (1 - beta) s (log s/m - KL(s || m)) / T

CE is the cross-entropy of the target at T = 1. T^2 keeps gradients of one size (Hinton et al. 2015, arXiv:1503.02531,
section 2). The generalized divergence is that of GKD (Agarwal et al. 2023, arXiv:2306.13649, eq. 1). A teacher is its
hidden states and head, or stored log-probabilities: the K largest of a row, and that of all the rest.

One loop over chunks of rows makes loss and gradients, as in cross_entropy.py. Parts of a vocabulary are combined by two
reductions of numbers of rows for each chunk; between forward and reverse there is a third.

Letters: N rows, R rows of a chunk, D and E widths of student and teacher, V vocabulary (of a vocabulary in parts, the
columns here), K stored log-probabilities.
"""

from dataclasses import dataclass, field
from math import log
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.chooser import device_kind
from meshwright.kernels.linear.linear import product_dtype
from meshwright.kernels.loss.cross_entropy import (
    IGNORED,
    HeadMatrix,
    Vocabulary,
    chunk_rows,
    multiplied_rows,
    take_gradients,
)
from meshwright.spec.memory.held import takes

LEAST_TAIL = 1e-30
"""Least sum over all other tokens, relative to the largest logit, before its logarithm is taken."""

LEAST_LOG = -1e4
"""Least log-probability of a teacher. Clamping to it avoids products of 0 and infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Loss between two distributions."""

    beta: float = 0.0
    """0: forward KL; 1: reverse KL; between: the generalized Jensen-Shannon divergence."""
    temperature: float = 1.0
    hard: float = 0.0
    """w: weight of the cross-entropy of the targets."""


FORWARD = Divergence()


class TeacherHead(NamedTuple):
    """A loaded teacher: the input of its head (N, E), and the head (V, E)."""

    x: Tensor
    weight: Tensor


class KnownTop(NamedTuple):
    """Stored log-probabilities of a teacher, at the temperature of the loss."""

    ids: Tensor
    """Likeliest tokens of the teacher (N, K) int64, without duplicates."""
    log_probabilities: Tensor
    """Log-probabilities of these tokens, and that of all others together (N, K + 1)."""

    @property
    def normal(self) -> Tensor:
        """Log-probabilities (N, K + 1) fp32, whose exponentials sum to 1 whatever they were rounded to."""
        return self.log_probabilities.float().clamp(min=LEAST_LOG).log_softmax(-1)


Teacher = TeacherHead | KnownTop


class DistillationLoss(NamedTuple):
    """Sums over rows, fp32."""

    loss: Tensor
    """Loss times scale, ()."""
    parts: Tensor
    """T^2 D and the cross-entropy (2,) in nats, without scale and gradient."""


class RowLosses(NamedTuple):
    """Losses of the rows of a chunk, fp32."""

    soft: Tensor
    """T^2 D (R,)."""
    hard: Tensor
    """Cross-entropy (R,)."""
    gradient: Tensor
    """Gradient of the sum of factor x loss, by logits (R, V)."""


@dataclass(frozen=True, slots=True)
class RowDivergence:
    """Arithmetic of the divergence of rows, with the reductions that combine the parts of a vocabulary."""

    vocabulary: Vocabulary | None
    form: Divergence

    def _largest(self, x: Tensor) -> Tensor:
        return self.vocabulary.largest(x) if self.vocabulary else x

    def _total(self, x: Tensor) -> Tensor:
        return self.vocabulary.total(x) if self.vocabulary else x

    def _columns_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of tokens in the logits here, and whether each token is among them."""
        parts = self.vocabulary
        if parts is None:
            return tokens.clamp(min=0), tokens >= 0
        local = tokens - parts.first
        return local.clamp(0, parts.number - 1), (tokens >= 0) & (local >= 0) & (local < parts.number)

    def losses_of_logits(self, ours: Tensor, theirs: Tensor, targets: Tensor, factor: Tensor) -> RowLosses:
        """Compute the losses from logits (R, V) fp32 of both, which are overwritten, and a factor (R,)."""
        temperature = self.form.temperature
        peak, their_peak = self._largest(torch.stack((ours.amax(1), theirs.amax(1)))).unsqueeze(-1).unbind(0)
        ours.sub_(peak)
        theirs.sub_(their_peak)
        index, mine = self._columns_of(targets)
        chosen = ours.gather(1, index.unsqueeze(1)).squeeze(1) * mine
        plain = ours.exp().sum(1) if temperature != 1 else None
        if temperature != 1:
            ours.div_(temperature)
            theirs.div_(temperature)
        gradient, probabilities, soft, sums = self._divergence(
            ours, theirs, [chosen, *([] if plain is None else [plain])]
        )
        total = sums[-1] if plain is not None else sums[0]
        gradient.mul_((factor * ((1 - self.form.hard) * temperature)).unsqueeze(1))
        self._add_hard(gradient, ours, probabilities, total, index, mine, factor)
        return RowLosses(soft * temperature**2, total.log() - sums[1], gradient)

    def _divergence(
        self, ours: Tensor, theirs: Tensor, more: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Compute the divergence from tempered logits less their maxima. `ours` stay intact.

        Returns (gradient (R, V) times the temperature, s (R, V), D (R,), sums), where sums are those of exponentials of
        the student and of `more`, over the whole vocabulary.
        """
        beta = self.form.beta
        s, t = ours.exp(), theirs.exp()
        cross = []
        if beta in (0, 1):
            cross = [(theirs - ours).mul_(t).sum(1) if beta == 0 else (ours - theirs).mul_(s).sum(1)]
        totals = self._total(torch.stack([s.sum(1), t.sum(1), *cross, *more])).unbind(0)
        whole, their_whole, rest = totals[0], totals[1], totals[2 + len(cross) :]
        s.div_(whole.unsqueeze(1))
        shift = whole.log() - their_whole.log()
        if beta == 0:
            soft = totals[2] / their_whole + shift
            gradient = t.div_(their_whole.unsqueeze(1)).neg_().add_(s)
        elif beta == 1:
            soft = totals[2] / whole - shift
            gradient = theirs.neg_().add_(ours).sub_((shift + soft).unsqueeze(1)).mul_(s)
        else:
            t.div_(their_whole.unsqueeze(1))
            theirs.sub_(their_whole.log().unsqueeze(1))
            gradient, soft = self._between(ours, whole.log().unsqueeze(1), theirs, s, t)
        return gradient, s, soft, (whole, *rest)

    def _between(self, ours: Tensor, log_whole: Tensor, theirs: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return (gradient, D) for 0 < beta < 1.

        Takes the student's logits and the logarithm of their sum of exponentials (R, 1), the teacher's
        log-probabilities, and the probabilities (R, V) of both. The teacher's are overwritten. One more (R, V) is
        alive: log m, then log s/m.
        """
        beta = self.form.beta
        gradient = ours - (log_whole - log(1 - beta) + log(beta))
        torch.logaddexp(gradient, theirs, out=gradient).add_(log(beta))
        over = t.mul_(theirs.sub_(gradient)).sum(1)
        gradient.neg_().add_(ours).sub_(log_whole)
        over, under = self._total(torch.stack((over, torch.mul(gradient, s, out=t).sum(1)))).unbind(0)
        return gradient.sub_(under.unsqueeze(1)).mul_(s).mul_(1 - beta), beta * over + (1 - beta) * under

    def _add_hard(
        self, gradient: Tensor, ours: Tensor, probabilities: Tensor, total: Tensor, index: Tensor, mine: Tensor,
        factor: Tensor,
    ) -> None:  # fmt: skip
        """Add the cross-entropy's gradient. `ours` are tempered logits less their maximum."""
        if not self.form.hard:
            return
        row_factor, temperature = factor * self.form.hard, self.form.temperature
        if temperature == 1:
            gradient.addcmul_(probabilities, row_factor.unsqueeze(1))
        else:
            gradient.addcmul_(ours.mul(temperature).exp_(), (row_factor / total).unsqueeze(1))
        gradient.scatter_add_(1, index.unsqueeze(1), -(row_factor * mine).unsqueeze(1))

    def losses_of_known(self, ours: Tensor, teacher: KnownTop, targets: Tensor, factor: Tensor) -> RowLosses:
        """Compute as losses_of_logits does, from a teacher's stored log-probabilities.

        That is forward KL over its likeliest tokens and one bucket for the rest. Gradient: s_i - t_i for these tokens,
        s_i (1 - t_rest / s_rest) for each other.
        """
        temperature = self.form.temperature
        ours.sub_(self._largest(ours.amax(1)).unsqueeze(1))
        index, mine = self._columns_of(targets)
        chosen = ours.gather(1, index.unsqueeze(1)).squeeze(1) * mine
        plain = ours.exp().sum(1) if temperature != 1 else None
        if temperature != 1:
            ours.div_(temperature)
        columns, is_local = self._columns_of(teacher.ids)
        picked = ours.gather(1, columns) * is_local
        p = ours.exp()
        p.scatter_add_(1, columns, -p.gather(1, columns) * is_local)  # exactly 0 there
        sums = [p.sum(1), chosen, *([] if plain is None else [plain])]
        gathered = self._total(torch.cat((torch.stack(sums, 1), picked), 1))
        rest, chosen, picked = gathered[:, 0].clamp(min=LEAST_TAIL), gathered[:, 1], gathered[:, len(sums) :]
        masses = picked.exp()
        whole = rest + masses.sum(1)
        theirs = teacher.normal
        logs = torch.cat((picked, rest.log().unsqueeze(1)), 1) - whole.log().unsqueeze(1)
        soft = F.kl_div(logs, theirs, reduction="none", log_target=True).sum(1)
        total = gathered[:, 2] if plain is not None else whole
        probabilities = theirs.exp()
        scaled = factor * ((1 - self.form.hard) * temperature)
        inside = (masses / whole.unsqueeze(1) - probabilities[:, :-1]) * scaled.unsqueeze(1)
        gradient = p.mul_((scaled * (1 / whole - probabilities[:, -1] / rest)).unsqueeze(1))
        gradient.scatter_add_(1, columns, inside * is_local)
        if self.form.hard:
            shares = (ours.exp() / whole.unsqueeze(1)) if temperature == 1 else ours
            self._add_hard(gradient, ours, shares, total, index, mine, factor)
        return RowLosses(soft * temperature**2, total.log() - chosen, gradient)


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
    divergences = divergence_of(ours, theirs.detach(), form.beta) * form.temperature**2
    hard = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    soft, hard = (divergences * valid).sum(), hard.sum()
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
        rows = chunk_rows(len(self.x), BUFFERS * columns, device_kind(self.x))
        total = torch.zeros(2, dtype=torch.float32, device=self.x.device)
        for start in range(0, len(self.x), rows):
            chunk = slice(start, start + rows)
            valid = self.targets[chunk] != IGNORED
            total += self._chunk(chunk, valid, multiplied_rows(valid, self.vocabulary), scale)
        return total

    def _chunk(self, chunk: slice, valid: Tensor, multiplied: Tensor | None, scale: Tensor | None) -> Tensor:
        def rows_of_chunk(tensor: Tensor) -> Tensor:
            return tensor[chunk] if multiplied is None else tensor[chunk][multiplied]

        inputs, targets = rows_of_chunk(self.x).to(product_dtype(self.weight)), rows_of_chunk(self.targets)
        valid = valid if multiplied is None else valid[multiplied]
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
            self._add_gradients(self.head.padded_gradients(losses.gradient, inputs.dtype), inputs, chunk, multiplied)
        return torch.stack([(part * valid).sum() for part in (losses.soft, losses.hard)])

    def _add_gradients(self, logit_gradients: Tensor, inputs: Tensor, chunk: slice, multiplied: Tensor | None) -> None:
        """Add a chunk to the gradients of x and weight, from the padded gradients of its logits."""
        if self.x_gradient is not None:
            gradient = self.head.input_gradient(logit_gradients).to(self.x_gradient.dtype)
            if multiplied is None:
                self.x_gradient[chunk] = gradient
            else:
                self.x_gradient[chunk].zero_().index_copy_(0, multiplied, gradient)
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
        return *take_gradients(ctx, gradient, "linear_divergence"), *(None,) * 5


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


@takes("logits")
def linear_top_reference(x: Tensor, weight: Tensor, top_k: int, temperature: float = 1.0) -> KnownTop:
    """Return the `top_k` likeliest tokens of each row of softmax(x W^T / T), at most V.

    Their ids (N, K) int64, and log-probabilities (N, K + 1) fp32 with that of all others together. x (N, D), weight (V,
    D).
    """
    logs = (F.linear(x, weight).float() / temperature).log_softmax(-1)
    largest, ids = logs.topk(min(top_k, len(weight)))
    rest = logs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return KnownTop(ids, torch.cat((largest, rest), 1).clamp(min=LEAST_LOG))


@takes("logits")
@torch.no_grad()
def linear_top(
    x: Tensor, weight: Tensor, top_k: int, temperature: float = 1.0, vocabulary: Vocabulary | None = None
) -> KnownTop:
    """Compute as the reference does, chunk by chunk and without a gradient.

    With a vocabulary, `weight` is a part of the head, and every part gets the tokens of the whole vocabulary.
    """
    largest_part = vocabulary.most if vocabulary else len(weight)
    head = HeadMatrix.padded(weight, product_dtype(weight))
    # 2 x: the logits exist in the dtype of the product and in fp32 at once.
    rows = chunk_rows(len(x), 2 * largest_part, device_kind(x))
    tops = []
    for start in range(0, len(x), rows):
        inputs = x[start : start + rows].to(product_dtype(weight))
        tops.append(_top_of_logits(head.logits(inputs).float().div_(temperature), top_k, vocabulary))
    if not tops:
        tops = [KnownTop(x.new_zeros((0, top_k), dtype=torch.int64), x.new_zeros((0, top_k + 1)).float())]
    return KnownTop(*(torch.cat(parts) for parts in zip(*tops, strict=True)))


def _top_of_logits(logits: Tensor, top_k: int, parts: Vocabulary | None) -> KnownTop:
    """Find the likeliest tokens of logits (R, V) fp32, which are overwritten. Parts need three reductions."""
    vocabulary = parts.whole if parts else logits.shape[1]
    values, ids = logits.topk(min(top_k, logits.shape[1]))
    if parts is not None:
        values, ids = _gathered(values, ids, min(top_k, vocabulary), parts)
    peak = values[:, :1]
    logits.sub_(peak).exp_()
    total = logits.sum(1)
    first, last = (parts.first, parts.first + parts.number) if parts else (0, vocabulary)
    mine = (ids >= first) & (ids < last)
    columns = (ids - first).clamp(0, logits.shape[1] - 1)
    # The rest is summed without the likeliest tokens: subtracting them from the total would cancel.
    rest = logits.scatter_add_(1, columns, -logits.gather(1, columns) * mine).sum(1)  # exactly 0 there
    sums = torch.stack((total, rest))
    total, rest = (parts.total(sums) if parts else sums).unbind(0)
    logs = torch.cat((values - peak, rest.log().unsqueeze(1)), 1) - total.log().unsqueeze(1)
    return KnownTop(ids, logs.clamp(min=LEAST_LOG))


def _gathered(values: Tensor, ids: Tensor, top_k: int, parts: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return the largest values of all parts and their ids.

    Each part fills its columns of a table, which is summed. fp64 holds every id.
    """
    table = values.new_zeros((2, len(values), parts.parts, top_k), dtype=torch.float64)
    width = values.shape[1]
    table[0, :, parts.index].fill_(-torch.inf)
    table[0, :, parts.index, :width], table[1, :, parts.index, :width] = values.double(), (ids + parts.first).double()
    table = parts.total(table).flatten(2)
    largest, columns = table[0].topk(top_k)
    return largest.float(), table[1].gather(1, columns).long()
