"""Beams as sequences of the scheduler: they share blocks, and go on together.

A beam that is preempted is computed again while the others of its group wait; a group grows when all are there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from meshwright.serve.beam_search import BeamSearch
from meshwright.serve.cached_sequence import CachedSequence
from meshwright.serve.scheduler import Scheduler
from meshwright.serve.served_request import Ending, ServedAnswer, ServedRequest


@dataclass(slots=True, eq=False)
class _Group:
    request: ServedRequest
    search: BeamSearch
    room: int
    sequences: list[CachedSequence]
    """In the order of what is alive in the search."""
    numbers: list[int]
    """In order of arrival: those that no sequence of the group has."""
    logs: dict[CachedSequence, Tensor] = field(default_factory=dict)
    """(V,) log-probabilities of what follows those that are computed."""

    @property
    def ready(self) -> bool:
        return all(one in self.logs and one.computed == len(one.tokens) for one in self.sequences)


@final
class BeamGroups:
    """All searches of an engine."""

    def __init__(self, scheduler: Scheduler, broken: Callable[[CachedSequence], None]) -> None:
        """`broken`: what is done with a sequence whose logits are no numbers, before it ends."""
        self._scheduler, self._broken = scheduler, broken
        self._of: dict[CachedSequence, _Group] = {}

    @property
    def idle(self) -> bool:
        """Whether there is no search."""
        return not self._of

    def begin(self, sequence: CachedSequence, request: ServedRequest, search: BeamSearch, room: int) -> None:
        """A search whose prompt is a sequence that was added with as many copies as it has beams."""
        numbers = list(range(sequence.number + 1, sequence.number + sequence.copies))
        self._of[sequence] = _Group(request, search, room, [sequence], numbers)

    def take(self, owners: Sequence[CachedSequence], logits: Tensor) -> list[ServedAnswer]:
        """Go on from the sequences that a step gave logits (R, V), as far as they are beams. Answers that became
        whole."""
        touched = dict[_Group, None]()
        for place, sequence in enumerate(owners):
            group = self._of.get(sequence)
            if group is not None:
                group.logs[sequence] = logits[place].log_softmax(-1)
                touched[group] = None
        return [answer for group in touched if group.ready for answer in self._grow(group)]

    def cancel(self, request: ServedRequest) -> None:
        """Nobody wants its answers any more."""
        for group in {group for group in self._of.values() if group.request is request}:
            self._end(group)

    def _grow(self, group: _Group) -> list[ServedAnswer]:
        """One token more for each beam; the answers, where the search has ended."""
        if any(bool(group.logs[one].isnan().any()) for one in group.sequences):
            for one in group.sequences:
                self._broken(one)
            return self._all(group, "broken")
        if not group.search.alive[0].ids:
            group.request.cached = group.sequences[0].found
        parents = group.search.grow(_stacked(group))
        if not group.search.ended:
            self._branch(group, parents)
            return []
        for answer, found in zip(group.request.answers, group.search.whole, strict=False):
            for token, logprob in zip(found.ids, found.logprobs, strict=True):
                answer.take(token, logprob, [], group.room)
            answer.score = found.score
        return self._all(group, "length")

    def _branch(self, group: _Group, parents: Sequence[int]) -> None:
        """Sequences of the beams that are alive now. The first child of a beam takes its place."""
        before, group.logs = group.sequences, {}
        for place, one in enumerate(before):
            if place not in parents:
                self._scheduler.end(one)
                del self._of[one]
                group.numbers.append(one.number)
        before[0].copies = 1
        taken, now = set[int](), list[CachedSequence]()
        for parent in parents:
            one = before[parent]
            if parent in taken:
                one = self._scheduler.branch(one, group.numbers.pop())
                self._of[one] = group
            taken.add(parent)
            now.append(one)
        for one, beam in zip(now, group.search.alive, strict=True):
            one.tokens.append(beam.ids[-1])
        group.sequences = now

    def _all(self, group: _Group, ending: Ending) -> list[ServedAnswer]:
        """The answers of a group, which ends."""
        for answer in group.request.answers:
            answer.ending = answer.ending or ending
        self._end(group)
        return group.request.answers

    def _end(self, group: _Group) -> None:
        for one in group.sequences:
            self._scheduler.end(one)
            del self._of[one]


def _stacked(group: _Group) -> Tensor:
    """(A, V)."""
    return torch.stack([group.logs[one] for one in group.sequences])
