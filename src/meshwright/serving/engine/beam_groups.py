"""Beams as sequences of the scheduler, which share blocks and advance together.

A preempted beam is computed again while the others of its group wait. A group grows when all its beams are computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from meshwright.serving.engine.answers.beam_search import BeamSearch
from meshwright.serving.engine.cache.cached_sequence import CachedSequence
from meshwright.serving.engine.scheduler import Scheduler
from meshwright.serving.engine.served_request import Ending, ServedAnswer, ServedRequest


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
