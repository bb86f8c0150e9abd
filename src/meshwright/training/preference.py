"""Objectives over pairs: a better and a worse answer to one prompt, two documents of one row.

    dpo     -log sigmoid(beta d),  d = (log p(better) - log p_0(better)) - (log p(worse) - log p_0(worse))
            (Rafailov et al. 2023, arXiv:2305.18290, eq. 7; smoothing: Mitchell 2023, "A note on DPO with noisy
            preferences", eq. 3)
    ipo     (d' - 1 / (2 beta))^2, d' as d of the means over tokens (Azar et al. 2023, arXiv:2310.12036, eq. 17; the
            mean is TRL's reading of it)
    orpo    orpo.py

log p sums over the trained tokens of an answer; p_0 is the model as the run began (reference.py).

Letters: B rows, S positions that are here, A answers that a row has room for, P = A / 2 pairs.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model.predictions import Predictions
from meshwright.spec.objective_traits import FIGURES, most_answers
from meshwright.training.batches import Batch

REFERENCE = "reference"
"""Name of the answers' log-probabilities under the first weights, (B, A) fp64, in `Batch.more`."""


class AnswerSums(NamedTuple):
    """Of each answer of each row (B, A): sums over its trained tokens, 0 where there is none."""

    log_probability: Tensor
    """fp64, in nats. A sum of a thousand tokens in fp32 would leave few digits to a difference of two."""
    tokens: Tensor
    """fp64."""


def answer_sums(predictions: Predictions, batch: Batch, answers: int) -> AnswerSums:
    """Over whole sequences, whatever part of them is here."""
    found = predictions.log_probabilities(batch.targets).double()
    documents = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents.long()
    room = answers + 1  # padding may be numbered as one answer more
    rows = torch.arange(len(found), device=found.device).unsqueeze(1) * room
    places = (rows + documents.clamp(max=answers)).flatten()
    each = torch.stack((found.flatten(), (batch.targets >= 0).flatten().double()), 1)
    sums = each.new_zeros(len(found) * room, 2).index_add(0, places, each)
    return AnswerSums(*predictions.whole_sums(sums).view(len(found), room, 2)[:, :answers].unbind(-1))


class PairSide(NamedTuple):
    """One side of all pairs, (B, P) fp64 each."""

    log_probability: Tensor
    tokens: Tensor
    reference: Tensor
    """Log-probability under the first weights; 0 where the objective reads none."""

    @property
    def gain(self) -> Tensor:
        """Over the first weights."""
        return self.log_probability - self.reference

    @property
    def mean(self) -> Tensor:
        """Log-probability per token."""
        return self.log_probability / self.tokens


class Compared(NamedTuple):
    """Of pairs, (B, P) each."""

    loss: Tensor
    better: Tensor
    """Reward of the better answer."""
    worse: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PairObjective:
    """The mean of `compare` over the pairs of a step."""

    sequence: int
    """Tokens of a row, on all cp ranks together."""
    beta: float
    by_position = True
    figures = FIGURES

    @abstractmethod
    def compare(self, better: PairSide, worse: PairSide) -> Compared:
        """The loss of each pair, and its rewards, which are reported."""

    def count(self, batch: Batch) -> float:
        """Pairs."""
        return sum(batch.answers_of_rows) / 2

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """(1 + F,) fp32: the sum over pairs, in nats, and of what is reported."""
        answers = most_answers(self.sequence)
        sums = answer_sums(predictions, batch, answers)
        reference = batch.more.get(REFERENCE, torch.zeros_like(sums.log_probability))
        present = (sums.tokens > 0).unflatten(1, (-1, 2)).all(-1)
        filled = zip((*sums, reference), (-1.0, 1.0, -1.0), strict=True)  # where there is no pair: any finite gradient
        sides = [part.unflatten(1, (-1, 2)).where(present.unsqueeze(-1), filling) for part, filling in filled]
        better, worse = (PairSide(*(part[..., side] for part in sides)) for side in (0, 1))
        found = self.compare(better, worse)
        margin = found.better - found.worse
        rewards = found.better, found.worse, margin, (margin > 0).double()
        total, *figures = ((part * present).sum() for part in (found.loss, *rewards))
        total = total if scale is None else total * scale
        return torch.stack((total, *(figure.detach() for figure in figures))).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO(PairObjective):
    """Direct preference optimization."""

    smoothing: float = 0.0
    """Share of pairs that are the wrong way round."""

    def compare(self, better: PairSide, worse: PairSide) -> Compared:
        """The reward is beta times the gain."""
        margin = self.beta * (better.gain - worse.gain)
        loss = -F.logsigmoid(margin) * (1 - self.smoothing) - F.logsigmoid(-margin) * self.smoothing
        return Compared(loss, self.beta * better.gain, self.beta * worse.gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class IPO(PairObjective):
    """Identity preference optimization: the margin is led to 1 / (2 beta), and not beyond."""

    def compare(self, better: PairSide, worse: PairSide) -> Compared:
        """The reward is beta times the gain."""
        margin = better.gain / better.tokens - worse.gain / worse.tokens
        return Compared((margin - 1 / (2 * self.beta)) ** 2, self.beta * better.gain, self.beta * worse.gain)
