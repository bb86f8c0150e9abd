"""Rows of logits of a student against a teacher: what a chunk of linear_divergence.py computes of them.

Letters: R rows of a chunk, V vocabulary (of a vocabulary in parts, its columns here), K kept log-probabilities.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.cross_entropy import Vocabulary

LEAST_TAIL = 1e-30
"""Of all other tokens together, over the largest logit: a logarithm is taken of it."""

LEAST_LOG = -1e4
"""A teacher's log-probability below which there is nothing: no product of 0 and infinity comes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Which loss is made of two distributions."""

    beta: float = 0.0
    """0: forward KL; 1: reverse KL; between: the generalized Jensen-Shannon divergence."""
    temperature: float = 1.0
    hard: float = 0.0
    """w: weight of the cross-entropy of the targets."""


FORWARD = Divergence()


class TeacherHead(NamedTuple):
    """A teacher that is here: what its head reads (N, E), and the head (V, E)."""

    x: Tensor
    weight: Tensor


class KnownTop(NamedTuple):
    """A teacher of which something was kept, at the temperature of the loss."""

    ids: Tensor
    """Of its likeliest tokens (N, K) int64, none twice."""
    log_probabilities: Tensor
    """Theirs, and that of all others together (N, K + 1)."""

    @property
    def normal(self) -> Tensor:
        """(N, K + 1) fp32, whose exponentials sum to 1 whatever they were rounded to."""
        return self.log_probabilities.float().clamp(min=LEAST_LOG).log_softmax(-1)


Teacher = TeacherHead | KnownTop


class DistillationLoss(NamedTuple):
    """Sums over rows, fp32."""

    loss: Tensor
    """() times scale."""
    parts: Tensor
    """(2,) without scale and gradient: T^2 D, and the cross-entropy, in nats."""


def log_of(number: float) -> float:
    """Its logarithm."""
    return math.log(number)


class RowLosses(NamedTuple):
    """Of the rows of a chunk, fp32."""

    soft: Tensor
    """T^2 D (R,)."""
    hard: Tensor
    """Cross-entropy (R,)."""
    gradient: Tensor
    """Of logits (R, V): of the sum of factor x loss."""


@dataclass(frozen=True, slots=True)
class RowDivergence:
    """The arithmetic, with what combines the parts of a vocabulary."""

    vocabulary: Vocabulary | None
    form: Divergence

    def _largest(self, x: Tensor) -> Tensor:
        return self.vocabulary.largest(x) if self.vocabulary else x

    def _total(self, x: Tensor) -> Tensor:
        return self.vocabulary.total(x) if self.vocabulary else x

    def _places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(columns of the logits here, whether the token is one of them) of tokens of the whole vocabulary."""
        parts = self.vocabulary
        if parts is None:
            return tokens.clamp(min=0), tokens >= 0
        local = tokens - parts.first
        return local.clamp(0, parts.number - 1), (tokens >= 0) & (local >= 0) & (local < parts.number)

    def of_logits(self, ours: Tensor, theirs: Tensor, targets: Tensor, factor: Tensor) -> RowLosses:
        """Of logits (R, V) fp32 of both, which are used up, and a factor (R,) of each row."""
        heat = self.form.temperature
        peak, their_peak = self._largest(torch.stack((ours.amax(1), theirs.amax(1)))).unsqueeze(-1).unbind(0)
        ours.sub_(peak)
        theirs.sub_(their_peak)
        index, mine = self._places(targets)
        chosen = ours.gather(1, index.unsqueeze(1)).squeeze(1) * mine
        plain = ours.exp().sum(1) if heat != 1 else None
        if heat != 1:
            ours.div_(heat)
            theirs.div_(heat)
        made, probabilities, soft, sums = self._divergence(ours, theirs, [chosen, *([] if plain is None else [plain])])
        total = sums[-1] if plain is not None else sums[0]
        made.mul_((factor * ((1 - self.form.hard) * heat)).unsqueeze(1))
        self._add_hard(made, ours, probabilities, total, index, mine, factor)
        return RowLosses(soft * heat**2, total.log() - sums[1], made)

    def _divergence(
        self, ours: Tensor, theirs: Tensor, more: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """(gradient (R, V) times the temperature, s (R, V), D (R,), sums of exponentials of the student and of `more`
        over the whole vocabulary) of logits over the temperature, less their maxima; `ours` are left."""
        beta = self.form.beta
        s, t = ours.exp(), theirs.exp()
        cross = []
        if beta in (0, 1):
            cross = [(theirs - ours).mul_(t).sum(1) if beta == 0 else (ours - theirs).mul_(s).sum(1)]
        found = self._total(torch.stack([s.sum(1), t.sum(1), *cross, *more])).unbind(0)
        whole, their_whole, rest = found[0], found[1], found[2 + len(cross) :]
        s.div_(whole.unsqueeze(1))
        shift = whole.log() - their_whole.log()
        if beta == 0:
            soft = found[2] / their_whole + shift
            made = t.div_(their_whole.unsqueeze(1)).neg_().add_(s)
        elif beta == 1:
            soft = found[2] / whole - shift
            made = theirs.neg_().add_(ours).sub_((shift + soft).unsqueeze(1)).mul_(s)
        else:
            t.div_(their_whole.unsqueeze(1))
            theirs.sub_(their_whole.log().unsqueeze(1))
            made, soft = self._between(ours, whole.log().unsqueeze(1), theirs, s, t)
        return made, s, soft, (whole, *rest)

    def _between(
        self, ours: Tensor, log_whole: Tensor, theirs: Tensor, s: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(gradient, D) of the student's logits and the logarithm of their sum of exponentials (R, 1), of the teacher's
        log-probabilities, and of probabilities (R, V) of both. What is the teacher's is used up. One more (R, V) is
        alive: log m, then log s/m."""
        beta = self.form.beta
        made = ours - (log_whole - log_of(1 - beta) + log_of(beta))
        torch.logaddexp(made, theirs, out=made).add_(log_of(beta))
        over = t.mul_(theirs.sub_(made)).sum(1)
        made.neg_().add_(ours).sub_(log_whole)
        over, under = self._total(torch.stack((over, torch.mul(made, s, out=t).sum(1)))).unbind(0)
        return made.sub_(under.unsqueeze(1)).mul_(s).mul_(1 - beta), beta * over + (1 - beta) * under

    def _add_hard(
        self, made: Tensor, ours: Tensor, probabilities: Tensor, total: Tensor, index: Tensor, mine: Tensor,
        factor: Tensor,
    ) -> None:  # fmt: skip
        """The cross-entropy's part of the gradient; `ours` are logits over the temperature, less their maximum."""
        if not self.form.hard:
            return
        each, heat = factor * self.form.hard, self.form.temperature
        if heat == 1:
            made.addcmul_(probabilities, each.unsqueeze(1))
        else:
            made.addcmul_(ours.mul(heat).exp_(), (each / total).unsqueeze(1))
        made.scatter_add_(1, index.unsqueeze(1), -(each * mine).unsqueeze(1))

    def of_known(
        self, ours: Tensor, known: KnownTop, targets: Tensor, factor: Tensor
    ) -> RowLosses:  # fmt: skip
        """As of_logits, of what was kept of a teacher: forward KL over its likeliest tokens and one bucket for the
        rest. Gradient: s_i - t_i of these tokens, s_i (1 - t_rest / s_rest) of each other."""
        heat = self.form.temperature
        ours.sub_(self._largest(ours.amax(1)).unsqueeze(1))
        index, mine = self._places(targets)
        chosen = ours.gather(1, index.unsqueeze(1)).squeeze(1) * mine
        plain = ours.exp().sum(1) if heat != 1 else None
        if heat != 1:
            ours.div_(heat)
        columns, here = self._places(known.ids)
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
        scaled = factor * ((1 - self.form.hard) * heat)
        inside = (each / whole.unsqueeze(1) - probabilities[:, :-1]) * scaled.unsqueeze(1)
        made = p.mul_((scaled * (1 / whole - probabilities[:, -1] / rest)).unsqueeze(1))
        made.scatter_add_(1, columns, inside * here)
        if self.form.hard:
            shares = (ours.exp() / whole.unsqueeze(1)) if heat == 1 else ours
            self._add_hard(made, ours, shares, total, index, mine, factor)
        return RowLosses(soft * heat**2, total.log() - chosen, made)
