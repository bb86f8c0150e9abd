"""Rows of logits of a student against a teacher: what a chunk of linear_divergence.py computes of them.

Letters: R rows of a chunk, V vocabulary (of a vocabulary in parts, its columns here), K kept log-probabilities.
"""

from dataclasses import dataclass
from math import log
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.cross_entropy import Vocabulary

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
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
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

    def _between(
        self, ours: Tensor, log_whole: Tensor, theirs: Tensor, s: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
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
        each, temperature = factor * self.form.hard, self.form.temperature
        if temperature == 1:
            gradient.addcmul_(probabilities, each.unsqueeze(1))
        else:
            gradient.addcmul_(ours.mul(temperature).exp_(), (each / total).unsqueeze(1))
        gradient.scatter_add_(1, index.unsqueeze(1), -(each * mine).unsqueeze(1))

    def losses_of_known(
        self, ours: Tensor, known: KnownTop, targets: Tensor, factor: Tensor
    ) -> RowLosses:  # fmt: skip
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
        columns, here = self._columns_of(known.ids)
        picked = ours.gather(1, columns) * here
        p = ours.exp()
        p.scatter_add_(1, columns, -p.gather(1, columns) * here)  # exactly 0 there
        sums = [p.sum(1), chosen, *([] if plain is None else [plain])]
        gathered = self._total(torch.cat((torch.stack(sums, 1), picked), 1))
        rest, chosen, picked = gathered[:, 0].clamp(min=LEAST_TAIL), gathered[:, 1], gathered[:, len(sums) :]
        each = picked.exp()
        whole = rest + each.sum(1)
        theirs = known.normal
        logs = torch.cat((picked, rest.log().unsqueeze(1)), 1) - whole.log().unsqueeze(1)
        soft = F.kl_div(logs, theirs, reduction="none", log_target=True).sum(1)
        total = gathered[:, 2] if plain is not None else whole
        probabilities = theirs.exp()
        scaled = factor * ((1 - self.form.hard) * temperature)
        inside = (each / whole.unsqueeze(1) - probabilities[:, :-1]) * scaled.unsqueeze(1)
        gradient = p.mul_((scaled * (1 / whole - probabilities[:, -1] / rest)).unsqueeze(1))
        gradient.scatter_add_(1, columns, inside * here)
        if self.form.hard:
            shares = (ours.exp() / whole.unsqueeze(1)) if temperature == 1 else ours
            self._add_hard(gradient, ours, shares, total, index, mine, factor)
        return RowLosses(soft * temperature**2, total.log() - chosen, gradient)
