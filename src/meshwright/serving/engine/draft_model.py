"""A small model that guesses for a large one.

Its keys and values lie in the same blocks, in separate stores, so hits, forks and preemptions are those of the large
model's sequences.
"""

from collections.abc import Mapping
from typing import final

import torch

from meshwright.serving.engine.cache.cached_sequence import CachedSequence
from meshwright.serving.engine.runner import Runner
from meshwright.serving.engine.sampler import SampledRow, sample
from meshwright.serving.engine.scheduler import StepPlan


@final
class DraftModel:
    """Source of guesses. Use under `torch.no_grad`."""

    def __init__(self, runner: Runner) -> None:
        """Take the runner of the small model, over a cache of as many blocks of the same size."""
        self.runner = runner

    def fill(
        self, plan: StepPlan, guessed: Mapping[CachedSequence, int], rows: Mapping[CachedSequence, SampledRow]
    ) -> None:  # fmt: skip
        """Compute what the step computes, and replace each guess by a token.

        A guess is drawn with the random number that the large model will use, so both draw the same token where they
        agree.
        """
        guesses: dict[CachedSequence, list[int]] = {sequence: [] for sequence in guessed}
        first = {sequence: count - guessed.get(sequence, 0) for sequence, count in plan.chunks.items()}
        todo, step = first, 0
        self.runner.cache.carry_out(plan.moves)
        while todo:
            owners, logits = self.runner.run(StepPlan(todo), behind=step)
            drawing = [
                row for row, sequence in enumerate(owners) if len(guesses.get(sequence, ())) < guessed.get(sequence, 0)
            ]
            if drawing:
                self._draw(logits[drawing], [owners[row] for row in drawing], guesses, rows)
            step += 1
            todo = {sequence: 1 for sequence, count in guessed.items() if step <= count}

    def _draw(
        self, logits: torch.Tensor, owners: list[CachedSequence], guesses: dict[CachedSequence, list[int]],
        rows: Mapping[CachedSequence, SampledRow],
    ) -> None:  # fmt: skip
        sampled = sample(logits, [following(rows[owner], guesses[owner]) for owner in owners])
        for sequence, token in zip(owners, sampled.tokens, strict=True):
            position = len(sequence.tokens) - sequence.guessed + len(guesses[sequence])
            sequence.tokens[position] = token
            guesses[sequence].append(token)


def following(row: SampledRow, guess: list[int]) -> SampledRow:
    """Return a row as it is after further guesses."""
    return SampledRow(row.options, row.seed, row.prompt, [*row.made, *guess]) if guess else row
