"""On-policy distillation (GKD, Agarwal et al. 2024, arXiv:2306.13649): the student writes the answers that its teacher
then scores, so that it learns from the mistakes which it makes itself.

A share lambda of the steps is of this kind, drawn by (seed, place in the data): so a run that goes on draws the same.
In such a step every document of a row keeps its prompt, and the student writes what comes behind it, at most as long as
what the text has. A prompt is what stands before the last answer; of plain text it is the first half. Every rank writes
the rows that it reads; an answer's seed is that of its row, whatever rank reads it.
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
from meshwright.spec.sampling_memory import at_once
from meshwright.store.run_folder import RunFolder
from meshwright.training.batches import Batch, Share
from meshwright.training.evaluate import evaluating


class AnswerSampler(Protocol):
    """Who makes answers of a model: the serving engine, which stands above the trainer."""

    def __call__(
        self, model: Transformer, prompts: Sequence[Sequence[int]], *, longest: int, most: Sequence[int],
        seeds: Sequence[int], temperature: float, stop_ids: Sequence[int], at_once: int,
    ) -> list[list[int]]:  # fmt: skip
        """New tokens of each prompt."""


class Gap(NamedTuple):
    """Where a row's document is to be written anew."""

    row: int
    begin: int
    """Of the document."""
    last: int
    """Of the prompt: the position that predicts the first new token."""
    most: int
    """New tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPolicy:
    """Which steps of a run are written by its student, and how."""

    plan: Plan
    share: Share
    stop_ids: tuple[int, ...]
    sampler: AnswerSampler

    def due(self, cursor: int) -> bool:
        """Whether the step that begins with this sample is one of them; the same on every rank."""
        return _number(self.plan.recipe.seed, cursor) < self.plan.recipe.distillation_on_policy * 2**63

    def rows(self, batch: Batch, engine: Engine, cursor: int) -> Batch:
        """This rank's part of a step from sample `cursor` on, written anew where it is due."""
        if not self.due(cursor):
            return batch
        recipe, first = self.plan.recipe, cursor + self.share.index * len(batch.tokens)
        tokens, found = batch.tokens.cpu(), list(gaps(batch))
        with evaluating(engine):
            answers = self.sampler(
                engine.model, [tokens[one.row, one.begin : one.last + 1].tolist() for one in found],
                longest=recipe.sequence, most=[one.most for one in found], temperature=recipe.distillation_sampling,
                seeds=[_number(recipe.seed, first + one.row, one.begin) for one in found], stop_ids=self.stop_ids,
                at_once=at_once(recipe, self.plan.layout),
            ) if found else []  # fmt: skip
        return written(batch, found, answers)


def on_policy(
    plan: Plan, corpus: Corpus, folder: RunFolder, share: Share, sampler: AnswerSampler | None
) -> OnPolicy | None:  # fmt: skip
    """What a plan says of it; None where its student writes nothing."""
    if not plan.recipe.distillation_on_policy:
        return None
    assert sampler is not None, "the caller of a run gives one (api/training_run.py)"
    ends = (corpus.tokenizer.eos, *folder.end_ids())
    return OnPolicy(plan=plan, share=share, sampler=sampler, stop_ids=tuple({one for one in ends if one is not None}))


def gaps(batch: Batch) -> Iterator[Gap]:
    """Of each document that has a target: behind what stands before its last answer, or in its middle."""
    targets = batch.targets.cpu()
    borders = None if batch.documents is None else batch.documents.cpu()
    for row, valid in enumerate((targets >= 0).tolist()):
        for begin, end in _documents(None if borders is None else borders[row], len(valid)):
            known = [place for place in range(begin, end) if valid[place]]
            if not known:
                continue
            last = known[-1]
            first = next((place + 1 for place in range(last, begin - 1, -1) if not valid[place]), begin)
            if first == begin:  # no prompt
                first = begin + (last - begin) // 2
            yield Gap(row, begin, first, last - first + 1)


def _documents(borders: Tensor | None, length: int) -> Iterator[tuple[int, int]]:
    if borders is None:
        yield 0, length
        return
    starts = [0, *((borders[1:] != borders[:-1]).nonzero().flatten() + 1).tolist(), length]
    yield from pairwise(starts)


def written(batch: Batch, places: Sequence[Gap], answers: Sequence[Sequence[int]]) -> Batch:
    """The batch with answers behind their prompts, which alone are targets. What stands behind a shorter answer stays,
    and nobody who counts sees it."""
    tokens, targets = batch.tokens.cpu().clone(), torch.full_like(batch.targets, -100, device="cpu")
    for place, answer in zip(places, answers, strict=True):
        new = torch.tensor(answer[: place.most], dtype=torch.int64)
        targets[place.row, place.last : place.last + len(new)] = new
        tokens[place.row, place.last + 1 : place.last + len(new)] = new[:-1]
    valid = tuple((targets >= 0).sum(1).tolist())
    device = batch.tokens.device
    return replace(
        batch, tokens=tokens.to(device), targets=targets.to(device), valid=sum(valid), valid_of_rows=valid
    )  # fmt: skip


def _number(*of: int) -> int:
    """Below 2**63, spread evenly, of some numbers."""
    return int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=8).digest(), "big") >> 1
