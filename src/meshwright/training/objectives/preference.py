"""Objectives over pairs: a better and a worse answer to one prompt, which are two documents of one row.

    dpo     -log sigmoid(beta d),  d = (log p(better) - log p_0(better)) - (log p(worse) - log p_0(worse))
            (Rafailov et al. 2023, arXiv:2305.18290, eq. 7; smoothing: Mitchell 2023, "A note on DPO with noisy
            preferences", eq. 3)
    ipo     (d' - 1 / (2 beta))^2, d' as d of the means over tokens (Azar et al. 2023, arXiv:2310.12036, eq. 17; the
            mean is TRL's reading of it)
    orpo    -log q(better) - beta log sigmoid(log odds(better) - log odds(worse)),  odds = q / (1 - q)
            q is the geometric mean of p over trained tokens (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7). Every
            pair counts alike; TRL weighs the first term by tokens, and takes it over the prompt too

log p sums over the trained tokens of an answer; p_0 is the model at the start of the run (reference.py). ORPO needs no
p_0.

Letters: B rows, S positions of this rank, A answers that fit into a row, P = A / 2 pairs.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model.predictions import Predictions
from meshwright.spec.recipe.recipe import FIGURES, most_answers
from meshwright.training.step.batches import Batch

REFERENCE = "reference"
"""Name in `Batch.more` of the answers' log-probabilities under the first weights, (B, A) fp64."""


class AnswerSums(NamedTuple):
    """Sums over the trained tokens of each answer of each row (B, A), 0 without an answer."""

    log_probability: Tensor
    """fp64, in nats. A sum of a thousand tokens in fp32 leaves few digits to a difference of two."""
    tokens: Tensor
    """fp64."""


def answer_sums(predictions: Predictions, batch: Batch, answers: int) -> AnswerSums:
    """Sum log-probabilities over whole sequences, whatever part of them this rank has."""
    log_probabilities = predictions.log_probabilities(batch.targets).double()
    documents = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents.long()
    room = answers + 1  # padding may be numbered as one answer more
    rows = torch.arange(len(log_probabilities), device=log_probabilities.device).unsqueeze(1) * room
    slots = (rows + documents.clamp(max=answers)).flatten()
    addends = torch.stack((log_probabilities.flatten(), (batch.targets >= 0).flatten().double()), 1)
    sums = addends.new_zeros(len(log_probabilities) * room, 2).index_add(0, slots, addends)
    return AnswerSums(*predictions.whole_sums(sums).view(len(log_probabilities), room, 2)[:, :answers].unbind(-1))


class PairSide(NamedTuple):
    """One side of all pairs, (B, P) fp64 each."""

    log_probability: Tensor
    tokens: Tensor
    reference: Tensor
    """Log-probability under the first weights. 0 when the objective reads none."""

    @property
    def gain(self) -> Tensor:
        """Log-probability relative to the first weights."""
        return self.log_probability - self.reference

    @property
    def mean(self) -> Tensor:
        """Log-probability per token."""
        return self.log_probability / self.tokens


class Compared(NamedTuple):
    """Loss and rewards of pairs, (B, P) each."""

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
        """Return the loss of each pair, and its rewards, which are reported."""

    def count(self, batch: Batch) -> float:
        """Return the number of pairs."""
        return sum(batch.answers_of_rows) / 2

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Return (1 + F,) fp32: the sum of losses over pairs in nats, and of the reported figures."""
        answers = most_answers(self.sequence)
        sums = answer_sums(predictions, batch, answers)
        reference = batch.more.get(REFERENCE, torch.zeros_like(sums.log_probability))
        present = (sums.tokens > 0).unflatten(1, (-1, 2)).all(-1)
        # Slots without a pair get values with a finite gradient, which `present` then drops.
        filled = zip((*sums, reference), (-1.0, 1.0, -1.0), strict=True)
        sides = [part.unflatten(1, (-1, 2)).where(present.unsqueeze(-1), filling) for part, filling in filled]
        better, worse = (PairSide(*(part[..., side] for part in sides)) for side in (0, 1))
        compared = self.compare(better, worse)
        margin = compared.better - compared.worse
        rewards = compared.better, compared.worse, margin, (margin > 0).double()
        total, *figures = ((part * present).sum() for part in (compared.loss, *rewards))
        total = total if scale is None else total * scale
        return torch.stack((total, *(figure.detach() for figure in figures))).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO(PairObjective):
    """Direct preference optimization."""

    smoothing: float = 0.0
    """Share of pairs that are labelled the wrong way round."""

    def compare(self, better: PairSide, worse: PairSide) -> Compared:
        """Return each pair's loss. The reward is beta times the gain."""
        margin = self.beta * (better.gain - worse.gain)
        loss = -F.logsigmoid(margin) * (1 - self.smoothing) - F.logsigmoid(-margin) * self.smoothing
        return Compared(loss, self.beta * better.gain, self.beta * worse.gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class IPO(PairObjective):
    """Identity preference optimization: the margin approaches 1 / (2 beta) and does not exceed it."""

    def compare(self, better: PairSide, worse: PairSide) -> Compared:
        """Return each pair's loss. The reward is beta times the gain."""
        margin = better.gain / better.tokens - worse.gain / worse.tokens
        return Compared((margin - 1 / (2 * self.beta)) ** 2, self.beta * better.gain, self.beta * worse.gain)


SURE = -1e-7
"""Largest mean log-probability whose odds are taken; those of 0 are infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ORPO(PairObjective):
    """Odds ratio preference optimization."""

    def compare(self, better: PairSide, worse: PairSide) -> Compared:
        """Return each pair's loss. The reward is beta times the mean log-probability of a token."""
        ratio = log_odds(better.mean) - log_odds(worse.mean)
        loss = -better.mean - self.beta * F.logsigmoid(ratio)
        return Compared(loss, self.beta * better.mean, self.beta * worse.mean)


def log_odds(log_probability: Tensor) -> Tensor:
    """Return log(p / (1 - p)) given log p."""
    bounded = log_probability.clamp(max=SURE)
    return bounded - torch.log(-torch.expm1(bounded))
