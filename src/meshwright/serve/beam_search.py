"""Beam search: several beginnings of an answer are followed at once, and the best whole ones kept.

The rules are those of `generate(num_beams=...)` in transformers, so that scores and answers compare. Letters: A alive
beams, V vocab.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meshwright.serve.request_options import RequestOptions


@dataclass(frozen=True, slots=True)
class BeamCandidate:
    """A beginning of an answer, or a whole one."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0
    """Sum of the log-probabilities, nats, rounded to fp32 after each token."""
    score: float = 0.0
    """Of a whole one: `total` over its number of tokens to the power of the length penalty."""


@final
class BeamSearch:
    """The answers to one prompt."""

    def __init__(self, options: RequestOptions, end_ids: Collection[int], room: int) -> None:
        """`room`: most tokens of an answer, at least 1."""
        self._options, self._end_ids, self._room = options, end_ids, room
        self.alive = [BeamCandidate()]
        """Beginnings that go on, the likeliest first."""
        self.whole: list[BeamCandidate] = []
        """The best ended ones, best first; at most as many as there are beams."""
        self.ended = False
        self._improvable = True

    def grow(self, logs: Tensor) -> list[int]:
        """One token more, from log-probabilities (A, V) of what follows each that is alive. Whose child each new one of
        `alive` is; nothing any more where the search has `ended`."""
        beams = self._options.beams
        parents, grown = self._grown(logs, max(2, 1 + len(self._end_ids)) * beams)
        hits = [len(one.ids) >= self._room or one.ids[-1] in self._end_ids for one in grown]
        self._keep([one for one, hit in zip(grown[:beams], hits[:beams], strict=True) if hit])
        goes_on = [place for place, hit in enumerate(hits) if not hit][:beams]
        self.alive = [grown[place] for place in goes_on]
        full = len(self.whole) == beams
        if full and self._improvable:
            self._improvable = bool(self.alive) and self._best_possible() > self.whole[-1].score
        self.ended = not self._improvable or not self.alive or (full and self._options.early_stopping is True)
        return [] if self.ended else [parents[place] for place in goes_on]

    def _grown(self, logs: Tensor, most: int) -> tuple[list[int], list[BeamCandidate]]:
        """(whose child each is, the likeliest beginnings that are one token longer)."""
        totals = torch.tensor([one.total for one in self.alive], device=logs.device)
        found = (logs + totals[:, None]).flatten()
        best = found.topk(min(most, len(found)))
        places = [divmod(one, logs.shape[1]) for one in best.indices.tolist()]
        grown = [
            BeamCandidate(
                (*self.alive[row].ids, token), (*self.alive[row].logprobs, float(logs[row, token])), total
            )
            for (row, token), total in zip(places, best.values.tolist(), strict=True)
        ]  # fmt: skip
        return [row for row, _ in places], grown

    def _keep(self, ended: Sequence[BeamCandidate]) -> None:
        """Take ended ones in, as long as the search may take any."""
        full = len(self.whole) == self._options.beams
        if not self._improvable or (full and self._options.early_stopping is True):
            return
        penalty = self._options.length_penalty
        scored = [
            BeamCandidate(one.ids, one.logprobs, one.total, one.total / len(one.ids) ** penalty) for one in ended
        ]  # fmt: skip
        self.whole = sorted([*self.whole, *scored], key=lambda one: -one.score)[: self._options.beams]

    def _best_possible(self) -> float:
        """The score that the likeliest beginning would have if it ended: here, or with `never` at the last token."""
        penalty, length = self._options.length_penalty, len(self.alive[0].ids)
        if self._options.early_stopping == "never" and penalty > 0:
            length = self._room
        return float(self.alive[0].total / length**penalty)
