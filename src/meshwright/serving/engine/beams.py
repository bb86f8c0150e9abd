"""Beam search: several beginnings of an answer are extended at once, and the best complete ones kept.

The rules are those of `generate(num_beams=...)` in transformers, so that scores and answers compare. Beams are
sequences of the scheduler, which share blocks. A preempted beam is computed again while the others of its group wait.

Letters: A living beams, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache.blocks import CachedSequence
from meshwright.serving.engine.scheduler import Scheduler
from meshwright.serving.engine.served_request import Ending, ServedAnswer, ServedRequest


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
        # Enough candidates that as many beams go on even if every end token is among them.
        parents, grown = self._extend(logs, max(2, 1 + len(self._end_ids)) * beams)
        ends = [len(beam.ids) >= self._room or beam.ids[-1] in self._end_ids for beam in grown]
        # Ends among the likeliest only: the others would rank behind a living beam.
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
            BeamCandidate((*self.alive[row].ids, token), (*self.alive[row].logprobs, float(logs[row, token])), total)
            for (row, token), total in zip(cells, best.values.tolist(), strict=True)
        ]
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


@dataclass(slots=True, eq=False)
class _Group:
    request: ServedRequest
    search: BeamSearch
    room: int
    sequences: list[CachedSequence]
    """In the order of the search's living beams."""
    numbers: list[int]
    """Arrival numbers that no sequence of the group uses."""
    logs: dict[CachedSequence, Tensor] = field(default_factory=dict)
    """(V,) log-probabilities of the next token, for computed sequences."""

    @property
    def is_ready(self) -> bool:
        return all(beam in self.logs and beam.computed == len(beam.tokens) for beam in self.sequences)


@final
class BeamGroups:
    """All searches of an engine."""

    def __init__(self, scheduler: Scheduler, drop_broken: Callable[[CachedSequence], None]) -> None:
        """Take `drop_broken`, which ends a sequence whose logits are not finite."""
        self._scheduler, self._drop_broken = scheduler, drop_broken
        self._groups: dict[CachedSequence, _Group] = {}

    @property
    def idle(self) -> bool:
        """True when there is no search."""
        return not self._groups

    def begin(self, sequence: CachedSequence, request: ServedRequest, search: BeamSearch, room: int) -> None:
        """Start a search behind a sequence that was added with as many copies as there are beams."""
        numbers = list(range(sequence.number + 1, sequence.number + sequence.copies))
        self._groups[sequence] = _Group(request, search, room, [sequence], numbers)

    def take(self, owners: Sequence[CachedSequence], logits: Tensor) -> list[ServedAnswer]:
        """Advance the beams among the sequences of a step's logits (R, V), and return completed answers."""
        touched = dict[_Group, None]()
        for row, sequence in enumerate(owners):
            group = self._groups.get(sequence)
            if group is not None:
                group.logs[sequence] = logits[row].log_softmax(-1)
                touched[group] = None
        return [answer for group in touched if group.is_ready for answer in self._grow(group)]

    def cancel(self, request: ServedRequest) -> None:
        """End the search of a request."""
        for group in {group for group in self._groups.values() if group.request is request}:
            self._end(group)

    def _grow(self, group: _Group) -> list[ServedAnswer]:
        """Extend each beam by one token. Return the answers if the search has ended."""
        if any(bool(group.logs[sequence].isnan().any()) for sequence in group.sequences):
            # All beams, also sound ones: they share blocks with the broken one.
            for sequence in group.sequences:
                self._drop_broken(sequence)
            return self._finish(group, "broken")
        if not group.search.alive[0].ids:
            group.request.cached = group.sequences[0].cached
        parents = group.search.grow(torch.stack([group.logs[sequence] for sequence in group.sequences]))
        if not group.search.ended:
            self._branch(group, parents)
            return []
        for answer, beam in zip(group.request.answers, group.search.whole, strict=False):
            for token, logprob in zip(beam.ids, beam.logprobs, strict=True):
                answer.take(token, logprob, [], group.room)
            answer.score = beam.score
        return self._finish(group, "length")

    def _branch(self, group: _Group, parents: Sequence[int]) -> None:
        """Match sequences to the living beams. The first child of a beam continues its sequence."""
        before, group.logs = group.sequences, {}
        # Beams without a child end first, so that their numbers and blocks are free for new ones.
        for index, sequence in enumerate(before):
            if index not in parents:
                self._scheduler.end(sequence)
                del self._groups[sequence]
                group.numbers.append(sequence.number)
        before[0].copies = 1
        taken, children = set[int](), list[CachedSequence]()
        for parent in parents:
            sequence = before[parent]
            if parent in taken:
                sequence = self._scheduler.branch(sequence, group.numbers.pop())
                self._groups[sequence] = group
            taken.add(parent)
            children.append(sequence)
        for sequence, beam in zip(children, group.search.alive, strict=True):
            sequence.tokens.append(beam.ids[-1])
        group.sequences = children

    def _finish(self, group: _Group, ending: Ending) -> list[ServedAnswer]:
        for answer in group.request.answers:
            answer.ending = answer.ending or ending
        self._end(group)
        return group.request.answers

    def _end(self, group: _Group) -> None:
        for sequence in group.sequences:
            self._scheduler.end(sequence)
            del self._groups[sequence]
