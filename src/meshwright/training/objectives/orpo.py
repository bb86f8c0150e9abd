"""ORPO: cross-entropy of the better answer and an odds ratio against the worse one. It needs no reference.

    -log p(better) - beta log sigmoid(log odds(better) - log odds(worse)),   odds = p / (1 - p)

p is the geometric mean over an answer's trained tokens (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7). Every pair
counts alike; TRL weighs the first term by tokens, and takes it over the prompt too.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.training.objectives.preference import Compared, PairObjective, PairSide

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
    known = log_probability.clamp(max=SURE)
    return known - torch.log(-torch.expm1(known))
