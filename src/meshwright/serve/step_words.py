"""A step as numbers, for ranks that compute the same step over their own part of keys and values.

First what is moved, in order. Then of each sequence in a step: its number here and that of its adapter, what was
computed, how many tokens follow and which, and what is new in its table of blocks. Who reads this has sequences of its
own, of which each stands for one: what is decided by the identity of a sequence (dense_copies.py) is then decided
everywhere alike.
"""

from collections.abc import Sequence
from typing import final

from meshwright.serve.cached_sequence import CachedSequence, Phase
from meshwright.serve.host_tier import MOVES, Move
from meshwright.serve.scheduler import StepPlan


@final
class StepWriter:
    """Makes numbers of steps. A sequence that was preempted, or has ended, is forgotten with the next step."""

    def __init__(self) -> None:
        self._known: dict[CachedSequence, tuple[int, list[int]]] = {}
        self._number = 0

    def words(self, step: StepPlan) -> list[int]:
        """All that `StepReader` needs."""
        ended = [one for one in self._known if one.phase is not Phase.RUNNING]
        found = [len(ended), *(self._known.pop(one)[0] for one in ended)]
        moves = [(MOVES.index(move.kind), move.source, move.target) for move in step.moves]
        found += [len(moves), *(number for move in moves for number in move), len(step.chunks)]
        for sequence, count in step.chunks.items():
            found += self._of(sequence, count)
        return found

    def _of(self, sequence: CachedSequence, count: int) -> list[int]:
        number, told = self._known.get(sequence, (self._number, []))
        self._number += number == self._number
        table = sequence.table
        kept = len(told) if table[: len(told)] == told else 0
        self._known[sequence] = number, list(table)
        begin = sequence.computed
        return [
            number, sequence.adapter, begin, count, len(sequence.tokens), sequence.guessed, sequence.preemptions, kept,
            len(table) - kept, *table[kept:], *sequence.tokens[begin : begin + count],
        ]  # fmt: skip


@final
class StepReader:
    """Makes steps of the numbers, in the order in which they were written. Tokens that are not computed are zero."""

    def __init__(self) -> None:
        self._known: dict[int, CachedSequence] = {}

    def step(self, words: Sequence[int]) -> StepPlan:
        """What `StepWriter` was given."""
        rest = _StepNumbers(words)
        for number in rest.some():
            del self._known[number]
        moves = (rest.take(3) for _ in range(rest.one()))
        step = StepPlan(moves=[Move(MOVES[kind], source, target) for kind, source, target in moves])
        for _ in range(rest.one()):
            sequence, count = self._of(rest)
            step.chunks[sequence] = count
        return step

    def _of(self, rest: "_StepNumbers") -> tuple[CachedSequence, int]:
        number, adapter, begin, count, length, guessed, preemptions, kept = rest.take(8)
        sequence = self._known.get(number)
        if sequence is None:
            sequence = self._known[number] = CachedSequence(
                number, [], 0, b"", adapter=adapter, phase=Phase.RUNNING
            )  # fmt: skip
        sequence.table[kept:] = rest.some()
        tokens = sequence.tokens
        del tokens[length:]
        tokens += [0] * (length - len(tokens))
        tokens[begin : begin + count] = rest.take(count)
        sequence.computed, sequence.guessed, sequence.preemptions = begin, guessed, preemptions
        return sequence, count


class _StepNumbers:
    """Numbers that are read one behind the other."""

    def __init__(self, words: Sequence[int]) -> None:
        self._words, self._place = words, 0

    def take(self, count: int) -> list[int]:
        """The next so many."""
        begin = self._place
        self._place += count
        return list(self._words[begin : self._place])

    def one(self) -> int:
        """The next."""
        return self.take(1)[0]

    def some(self) -> list[int]:
        """As many as the next says, behind it."""
        return self.take(self.one())
