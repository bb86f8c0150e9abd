"""A step as integers, for ranks that compute the same step over their own part of keys and values.

First come moves, in order. Then for each sequence in a step: its number here and its adapter's, what was computed, how
many tokens follow and which, and new entries of its block table. The reader has its own sequence for each. Whatever
depends on the identity of a sequence (dense_copies.py) is then decided alike everywhere.
"""

from collections.abc import Sequence
from typing import final

from meshwright.serving.engine.cache.cached_sequence import CachedSequence, Phase
from meshwright.serving.engine.cache.host_tier import MOVES, Move
from meshwright.serving.engine.scheduler import StepPlan


@final
class StepWriter:
    """Encoder of steps. A preempted or ended sequence is forgotten with the next step."""

    def __init__(self) -> None:
        self._sequences: dict[CachedSequence, tuple[int, list[int]]] = {}
        self._number = 0

    def words(self, step: StepPlan) -> list[int]:
        """Return all that `StepReader` needs."""
        ended = [sequence for sequence in self._sequences if sequence.phase is not Phase.RUNNING]
        words = [len(ended), *(self._sequences.pop(sequence)[0] for sequence in ended)]
        moves = [(MOVES.index(move.kind), move.source, move.target) for move in step.moves]
        words += [len(moves), *(number for move in moves for number in move), len(step.chunks)]
        for sequence, count in step.chunks.items():
            words += self._sequence_words(sequence, count)
        return words

    def _sequence_words(self, sequence: CachedSequence, count: int) -> list[int]:
        number, known_table = self._sequences.get(sequence, (self._number, []))
        self._number += number == self._number
        table = sequence.table
        shared = len(known_table) if table[: len(known_table)] == known_table else 0
        self._sequences[sequence] = number, list(table)
        begin = sequence.computed
        return [
            number, sequence.adapter, begin, count, len(sequence.tokens), sequence.guessed, sequence.preemptions,
            shared, len(table) - shared, *table[shared:], *sequence.tokens[begin : begin + count],
        ]  # fmt: skip


@final
class StepReader:
    """Decoder of steps, in the order in which they were written. Tokens that are not computed are zero."""

    def __init__(self) -> None:
        self._sequences: dict[int, CachedSequence] = {}

    def step(self, words: Sequence[int]) -> StepPlan:
        """Return the step that `StepWriter` encoded."""
        rest = _StepNumbers(words)
        for number in rest.take_counted():
            del self._sequences[number]
        moves = (rest.take(3) for _ in range(rest.take_one()))
        step = StepPlan(moves=[Move(MOVES[kind], source, target) for kind, source, target in moves])
        for _ in range(rest.take_one()):
            sequence, count = self._read_sequence(rest)
            step.chunks[sequence] = count
        return step

    def _read_sequence(self, rest: "_StepNumbers") -> tuple[CachedSequence, int]:
        number, adapter, begin, count, length, guessed, preemptions, shared = rest.take(8)
        sequence = self._sequences.get(number)
        if sequence is None:
            sequence = self._sequences[number] = CachedSequence(
                number, [], 0, b"", adapter=adapter, phase=Phase.RUNNING
            )  # fmt: skip
        sequence.table[shared:] = rest.take_counted()
        tokens = sequence.tokens
        del tokens[length:]
        tokens += [0] * (length - len(tokens))
        tokens[begin : begin + count] = rest.take(count)
        sequence.computed, sequence.guessed, sequence.preemptions = begin, guessed, preemptions
        return sequence, count


class _StepNumbers:
    """Integers that are read in order."""

    def __init__(self, words: Sequence[int]) -> None:
        self._words, self._position = words, 0

    def take(self, count: int) -> list[int]:
        """Return the next `count` integers."""
        begin = self._position
        self._position += count
        return list(self._words[begin : self._position])

    def take_one(self) -> int:
        """Return the next integer."""
        return self.take(1)[0]

    def take_counted(self) -> list[int]:
        """Return as many integers as the next one says."""
        return self.take(self.take_one())
