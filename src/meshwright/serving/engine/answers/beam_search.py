"""Beam search: several beginnings of an answer are extended at once, and the best complete ones kept.

The rules are those of `generate(num_beams=...)` in transformers, so that scores and answers compare. Letters: A living
beams, V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meshwright.serving.engine.answers.request_options import RequestOptions


@dataclass(frozen=True, slots=True)
class BeamCandidate:
    """A beginning of an answer, or a complete one."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0
    """Sum of the log-probabilities in nats, rounded to fp32 after each token."""
    score: float = 0.0
    """Score of a complete answer: `total` / number of tokens ** length penalty."""


@final
class BeamSearch:
    """The answers to one prompt."""

    def __init__(self, options: RequestOptions, end_ids: Collection[int], room: int) -> None:
        """Start a search for answers of at most `room` >= 1 tokens."""
        self._options, self._end_ids, self._room = options, end_ids, room
        self.alive = [BeamCandidate()]
        """Beginnings that are extended, the likeliest first."""
        self.whole: list[BeamCandidate] = []
        """The best complete ones, best first, at most as many as there are beams."""
        self.ended = False
        self._improvable = True

    def grow(self, logs: Tensor) -> list[int]:
        """Extend the living beams by one token, given log-probabilities (A, V) of what follows each.

        Return the parent of each new living beam. Empty = the search has ended.
        """
        beams = self._options.beams
        parents, grown = self._extend(logs, max(2, 1 + len(self._end_ids)) * beams)
        ends = [len(beam.ids) >= self._room or beam.ids[-1] in self._end_ids for beam in grown]
        self._add_ended([beam for beam, is_end in zip(grown[:beams], ends[:beams], strict=True) if is_end])
        survivors = [index for index, is_end in enumerate(ends) if not is_end][:beams]
        self.alive = [grown[index] for index in survivors]
        full = len(self.whole) == beams
        if full and self._improvable:
            self._improvable = bool(self.alive) and self._best_possible() > self.whole[-1].score
        self.ended = not self._improvable or not self.alive or (full and self._options.early_stopping is True)
        return [] if self.ended else [parents[index] for index in survivors]

    def _extend(self, logs: Tensor, most: int) -> tuple[list[int], list[BeamCandidate]]:
        """Return the likeliest one-token extensions, and the parent of each."""
        totals = torch.tensor([beam.total for beam in self.alive], device=logs.device)
        scores = (logs + totals[:, None]).flatten()
        best = scores.topk(min(most, len(scores)))
        cells = [divmod(cell, logs.shape[1]) for cell in best.indices.tolist()]
        grown = [
            BeamCandidate(
                (*self.alive[row].ids, token), (*self.alive[row].logprobs, float(logs[row, token])), total
            )
            for (row, token), total in zip(cells, best.values.tolist(), strict=True)
        ]  # fmt: skip
        return [row for row, _ in cells], grown

    def _add_ended(self, ended: Sequence[BeamCandidate]) -> None:
        """Add complete beams, as long as the search accepts any."""
        full = len(self.whole) == self._options.beams
        if not self._improvable or (full and self._options.early_stopping is True):
            return
        penalty = self._options.length_penalty
        scored = [
            BeamCandidate(beam.ids, beam.logprobs, beam.total, beam.total / len(beam.ids) ** penalty) for beam in ended
        ]  # fmt: skip
        self.whole = sorted([*self.whole, *scored], key=lambda beam: -beam.score)[: self._options.beams]

    def _best_possible(self) -> float:
        """Return the best score that the likeliest beginning can reach: now, or with "never" at the last token."""
        penalty, length = self._options.length_penalty, len(self.alive[0].ids)
        if self._options.early_stopping == "never" and penalty > 0:
            length = self._room
        return float(self.alive[0].total / length**penalty)
