"""A small model that guesses for a large one. Its keys and values lie in the same blocks, in stores of its own: hits,
forks and preemption are those of the large one's sequences."""

from collections.abc import Mapping
from typing import final

import torch

from meshwright.serve.cached_sequence import CachedSequence
from meshwright.serve.runner import Runner
from meshwright.serve.sampler import SampledRow, sample
from meshwright.serve.scheduler import StepPlan


@final
class DraftModel:
    """Fills guesses in. Use under `torch.no_grad`."""

    def __init__(self, runner: Runner) -> None:
        """`runner`: of the small model, over a cache of as many blocks of the same size."""
        self.runner = runner

    def fill(
        self, plan: StepPlan, guessed: Mapping[CachedSequence, int], rows: Mapping[CachedSequence, SampledRow]
    ) -> None:  # fmt: skip
        """Compute what the step computes, and put a token in the place of each guess. A guess is drawn with the random
        number that the large model will draw with, so that both draw the same where they agree."""
        guesses: dict[CachedSequence, list[int]] = {one: [] for one in guessed}
        first = {one: count - guessed.get(one, 0) for one, count in plan.chunks.items()}
        todo, step = first, 0
        self.runner.cache.carry_out(plan.moves)
        while todo:
            owners, logits = self.runner.run(StepPlan(todo), behind=step)
            drawing = [place for place, one in enumerate(owners) if len(guesses.get(one, ())) < guessed.get(one, 0)]
            if drawing:
                self._draw(logits[drawing], [owners[place] for place in drawing], guesses, rows)
            step += 1
            todo = {one: 1 for one, count in guessed.items() if step <= count}

    def _draw(
        self, logits: torch.Tensor, owners: list[CachedSequence], guesses: dict[CachedSequence, list[int]],
        rows: Mapping[CachedSequence, SampledRow],
    ) -> None:  # fmt: skip
        found = sample(logits, [following(rows[one], guesses[one]) for one in owners])
        for sequence, token in zip(owners, found.tokens, strict=True):
            place = len(sequence.tokens) - sequence.guessed + len(guesses[sequence])
            sequence.tokens[place] = token
            guesses[sequence].append(token)


def following(row: SampledRow, guess: list[int]) -> SampledRow:
    """A row behind guesses that were made after its own tokens."""
    return SampledRow(row.options, row.seed, row.prompt, [*row.made, *guess]) if guess else row
