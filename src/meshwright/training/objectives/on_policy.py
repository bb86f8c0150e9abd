"""On-policy distillation (GKD, Agarwal et al. 2024, arXiv:2306.13649).

The student writes the answers that its teacher then scores, and so learns from its own mistakes.

A share lambda of the steps is on-policy, drawn by (seed, position in the data), so a resumed run draws the same. In
such a step every document of a row keeps its prompt. The student writes what follows, at most as long as in the text. A
prompt is what precedes the last answer; of plain text it is the first half. Every rank writes the rows that it reads.
An answer's seed is that of its row, whatever rank reads it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.data import Corpus
from meshwright.model import Transformer
from meshwright.parallel import Engine
from meshwright.spec import Plan
from meshwright.spec.memory.buffers import at_once
from meshwright.store.run_folder import RunFolder
from meshwright.training.step.batches import Batch, Share
from meshwright.training.step.evaluate import evaluating


class AnswerSampler(Protocol):
    """Sampler of answers: the serving engine, which is a layer above the trainer."""

    def __call__(
        self, model: Transformer, prompts: Sequence[Sequence[int]], *, longest: int, most: Sequence[int],
        seeds: Sequence[int], temperature: float, stop_ids: Sequence[int], at_once: int,
    ) -> list[list[int]]:  # fmt: skip
        """Return the new tokens of each prompt."""


class Gap(NamedTuple):
    """The part of a row's document that is written anew."""

    row: int
    begin: int
    """Start of the document."""
    last: int
    """End of the prompt: the position that predicts the first new token."""
    most: int
    """New tokens at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicy:
    """Choice and writing of a run's on-policy steps."""

    plan: Plan
    share: Share
    stop_ids: tuple[int, ...]
    sampler: AnswerSampler

    def due(self, cursor: int) -> bool:
        """Return whether the step that begins with this sample is on-policy, the same on every rank."""
        return _random_number(self.plan.recipe.seed, cursor) < self.plan.recipe.distillation_on_policy * 2**63

    def rows(self, batch: Batch, engine: Engine, cursor: int) -> Batch:
        """Return this rank's part of the step from sample `cursor` on, rewritten when it is on-policy."""
        if not self.due(cursor):
            return batch
        recipe, first = self.plan.recipe, cursor + self.share.index * len(batch.tokens)
        tokens, answer_gaps = batch.tokens.cpu(), list(find_gaps(batch))
        with evaluating(engine):
            answers = self.sampler(
                engine.model,
                [tokens[gap.row, gap.begin : gap.last + 1].tolist() for gap in answer_gaps],
                longest=recipe.sequence,
                most=[gap.most for gap in answer_gaps],
                seeds=[_random_number(recipe.seed, first + gap.row, gap.begin) for gap in answer_gaps],
                temperature=recipe.distillation_sampling,
                stop_ids=self.stop_ids,
                at_once=at_once(recipe, self.plan.layout),
            ) if answer_gaps else []  # fmt: skip
        return write_answers(batch, answer_gaps, answers)


def build_on_policy(
    plan: Plan, corpus: Corpus, folder: RunFolder, share: Share, sampler: AnswerSampler | None
) -> OnPolicy | None:  # fmt: skip
    """Return a plan's on-policy writer. None = its student writes nothing."""
    if not plan.recipe.distillation_on_policy:
        return None
    assert sampler is not None, "the caller of a run gives one (verbs/train/answer.py)"
    ends = (corpus.tokenizer.eos, *folder.end_ids())
    return OnPolicy(
        plan=plan, share=share, sampler=sampler, stop_ids=tuple({token for token in ends if token is not None})
    )


def find_gaps(batch: Batch) -> Iterator[Gap]:
    """Yield the gap of each document with a target: its last answer, or its second half without a prompt."""
    targets = batch.targets.cpu()
    borders = None if batch.documents is None else batch.documents.cpu()
    for row, valid in enumerate((targets >= 0).tolist()):
        for begin, end in _split_documents(None if borders is None else borders[row], len(valid)):
            last = next((position for position in range(end - 1, begin - 1, -1) if valid[position]), None)
            if last is None:
                continue
            first = next((position + 1 for position in range(last, begin - 1, -1) if not valid[position]), begin)
            if first == begin:  # no prompt
                first = begin + (last - begin) // 2
            yield Gap(row, begin, first, last - first + 1)


def _split_documents(borders: Tensor | None, length: int) -> Iterator[tuple[int, int]]:
    if borders is None:
        yield 0, length
        return
    starts = [0, *((borders[1:] != borders[:-1]).nonzero().flatten() + 1).tolist(), length]
    yield from pairwise(starts)


def write_answers(batch: Batch, answer_gaps: Sequence[Gap], answers: Sequence[Sequence[int]]) -> Batch:
    """Return the batch with the answers behind their prompts as the only targets.

    Old tokens behind a shorter answer stay, but no target sees them.
    """
    tokens, targets = batch.tokens.cpu().clone(), torch.full_like(batch.targets, -100, device="cpu")
    for gap, answer in zip(answer_gaps, answers, strict=True):
        new = torch.tensor(answer[: gap.most], dtype=torch.int64)
        targets[gap.row, gap.last : gap.last + len(new)] = new
        tokens[gap.row, gap.last + 1 : gap.last + len(new)] = new[:-1]
    valid = tuple((targets >= 0).sum(1).tolist())
    device = batch.tokens.device
    return replace(
        batch, tokens=tokens.to(device), targets=targets.to(device), valid=sum(valid), valid_of_rows=valid
    )  # fmt: skip


def _random_number(*seeds: int) -> int:
    """Return a number below 2**63 that is uniform over seeds."""
    return int.from_bytes(hashlib.blake2b(repr(seeds).encode(), digest_size=8).digest(), "big") >> 1
