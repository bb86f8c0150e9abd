"""The objectives that a recipe can name in addition to plain cross entropy, and what they read besides the text.

Pairs are a better and a worse answer to one prompt, which are two documents of one row:

    dpo     -log sigmoid(beta d),  d = (log p(better) - log p_0(better)) - (log p(worse) - log p_0(worse))
            (Rafailov et al. 2023, arXiv:2305.18290, eq. 7; smoothing: Mitchell 2023, "A note on DPO with noisy
            preferences", eq. 3)
    ipo     (d' - 1 / (2 beta))^2, d' as d of the means over tokens (Azar et al. 2023, arXiv:2310.12036, eq. 17; the
            mean is TRL's reading of it)
    orpo    -log q(better) - beta log sigmoid(log odds(better) - log odds(worse)),  odds = q / (1 - q)
            q is the geometric mean of p over trained tokens (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7). Every
            pair counts alike; TRL weighs the first term by tokens, and takes it over the prompt too

log p sums over the trained tokens of an answer; p_0 is the model at the start of the run (reference.py). ORPO needs no
p_0.

In a distillation a student learns the distributions of a teacher, token by token. The loss is the divergence of
kernels/loss/linear_divergence.py, summed over valid targets. The teacher is a second model in memory (teacher.py), or
stored log-probabilities (teacher_targets.py) in `Batch.more`.

On-policy distillation (GKD, Agarwal et al. 2024, arXiv:2306.13649) lets the student write the answers that its teacher
then scores, so that it learns from its own mistakes. A share lambda of the steps is on-policy, drawn by (seed, position
in the data), so a resumed run draws the same. In such a step every document of a row keeps its prompt. The student
writes what follows, at most as long as in the text. A prompt is what precedes the last answer; of plain text it is the
first half. Every rank writes the rows that it reads. An answer's seed is that of its row, whatever rank reads it.

Letters: B rows, S positions of this rank, A answers that fit into a row, P = A / 2 pairs, K stored log-probabilities.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.data import Corpus
from meshwright.kernels.loss.linear_divergence import DistillationLoss, Divergence, KnownTop
from meshwright.model import Transformer
from meshwright.model.transformer import Predictions
from meshwright.parallel import Engine
from meshwright.spec import Plan, Recipe
from meshwright.spec.memory.held import at_once
from meshwright.spec.recipe.recipe import FIGURES, TAUGHT, most_answers
from meshwright.store.run_folder import RunFolder
from meshwright.training.step.batches import AnswerReader, Batch, RowReader, Share
from meshwright.training.step.evaluate import evaluating
from meshwright.training.step.step import CROSS_ENTROPY, Objective


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
    return replace(batch, tokens=tokens.to(device), targets=targets.to(device), valid=sum(valid), valid_of_rows=valid)


def _random_number(*seeds: int) -> int:
    """Return a number below 2**63 that is uniform over seeds."""
    return int.from_bytes(hashlib.blake2b(repr(seeds).encode(), digest_size=8).digest(), "big") >> 1


REFERENCE = "reference"
"""Name in `Batch.more` of the answers' log-probabilities under the first weights, (B, A) fp64."""


class AnswerSums(NamedTuple):
    """Sums over the trained tokens of each answer of each row (B, A), 0 without an answer."""

    log_probability: Tensor
    """fp64, in nats. A sum of a thousand tokens in fp32 leaves few digits to a difference of two."""
    tokens: Tensor
    """fp64."""


def answer_sums(predictions: Predictions, batch: Batch, answers: int) -> AnswerSums:
    """Sum log-probabilities over whole sequences, whatever part of them this rank has."""
    log_probabilities = predictions.log_probabilities(batch.targets).double()
    documents = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents.long()
    room = answers + 1  # padding may be numbered as one answer more
    rows = torch.arange(len(log_probabilities), device=log_probabilities.device).unsqueeze(1) * room
    slots = (rows + documents.clamp(max=answers)).flatten()
    addends = torch.stack((log_probabilities.flatten(), (batch.targets >= 0).flatten().double()), 1)
    sums = addends.new_zeros(len(log_probabilities) * room, 2).index_add(0, slots, addends)
    return AnswerSums(*predictions.whole_sums(sums).view(len(log_probabilities), room, 2)[:, :answers].unbind(-1))


class PairSide(NamedTuple):
    """One side of all pairs, (B, P) fp64 each."""

    log_probability: Tensor
    tokens: Tensor
    reference: Tensor
    """Log-probability under the first weights. 0 when the objective reads none."""

    @property
    def gain(self) -> Tensor:
        """Log-probability relative to the first weights."""
        return self.log_probability - self.reference

    @property
    def mean(self) -> Tensor:
        """Log-probability per token."""
        return self.log_probability / self.tokens


class Compared(NamedTuple):
    """Loss and rewards of pairs, (B, P) each."""

    loss: Tensor
    better: Tensor
    """Reward of the better answer."""
    worse: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PairObjective:
    """The mean of `compare` over the pairs of a step."""

    sequence: int
    """Tokens of a row, on all cp ranks together."""
    beta: float
    by_position = True
    figures = FIGURES

    @abstractmethod
    def compare(self, better: PairSide, worse: PairSide) -> Compared:
        """Return the loss of each pair, and its rewards, which are reported."""

    def count(self, batch: Batch) -> float:
        """Return the number of pairs."""
        return sum(batch.answers_of_rows) / 2

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Return (1 + F,) fp32: the sum of losses over pairs in nats, and of the reported figures."""
        answers = most_answers(self.sequence)
        sums = answer_sums(predictions, batch, answers)
        reference = batch.more.get(REFERENCE, torch.zeros_like(sums.log_probability))
        present = (sums.tokens > 0).unflatten(1, (-1, 2)).all(-1)
        # Slots without a pair get values with a finite gradient, which `present` then drops.
        filled = zip((*sums, reference), (-1.0, 1.0, -1.0), strict=True)
        sides = [part.unflatten(1, (-1, 2)).where(present.unsqueeze(-1), filling) for part, filling in filled]
        better, worse = (PairSide(*(part[..., side] for part in sides)) for side in (0, 1))
        compared = self.compare(better, worse)
        margin = compared.better - compared.worse
        rewards = compared.better, compared.worse, margin, (margin > 0).double()
        total, *figures = ((part * present).sum() for part in (compared.loss, *rewards))
        total = total if scale is None else total * scale
        return torch.stack((total, *(figure.detach() for figure in figures))).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO(PairObjective):
    """Direct preference optimization."""

    smoothing: float = 0.0
    """Share of pairs that are labelled the wrong way round."""

    def compare(self, better: PairSide, worse: PairSide) -> Compared:
        """Return each pair's loss. The reward is beta times the gain."""
        margin = self.beta * (better.gain - worse.gain)
        loss = -F.logsigmoid(margin) * (1 - self.smoothing) - F.logsigmoid(-margin) * self.smoothing
        return Compared(loss, self.beta * better.gain, self.beta * worse.gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class IPO(PairObjective):
    """Identity preference optimization: the margin approaches 1 / (2 beta) and does not exceed it."""

    def compare(self, better: PairSide, worse: PairSide) -> Compared:
        """Return each pair's loss. The reward is beta times the gain."""
        margin = better.gain / better.tokens - worse.gain / worse.tokens
        return Compared((margin - 1 / (2 * self.beta)) ** 2, self.beta * better.gain, self.beta * worse.gain)


SURE = -1e-7
"""Largest mean log-probability whose odds are taken; those of 0 are infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ORPO(PairObjective):
    """Odds ratio preference optimization."""

    def compare(self, better: PairSide, worse: PairSide) -> Compared:
        """Return each pair's loss. The reward is beta times the mean log-probability of a token."""
        ratio = log_odds(better.mean) - log_odds(worse.mean)
        loss = -better.mean - self.beta * F.logsigmoid(ratio)
        return Compared(loss, self.beta * better.mean, self.beta * worse.mean)


def log_odds(log_probability: Tensor) -> Tensor:
    """Return log(p / (1 - p)) given log p."""
    bounded = log_probability.clamp(max=SURE)
    return bounded - torch.log(-torch.expm1(bounded))


BUILDERS: Mapping[str, Callable[[Recipe], Objective]] = {
    "cross-entropy": lambda recipe: CROSS_ENTROPY,
    "dpo": lambda recipe: DPO(
        sequence=recipe.sequence, beta=recipe.preference_beta, smoothing=recipe.preference_smoothing
    ),
    "ipo": lambda recipe: IPO(sequence=recipe.sequence, beta=recipe.preference_beta),
    "orpo": lambda recipe: ORPO(sequence=recipe.sequence, beta=recipe.preference_beta),
}
"""Every objective without a teacher. `teacher.build_distillation` makes the others."""


def objective_of(recipe: Recipe) -> Objective:
    """Return the objective of a recipe."""
    return BUILDERS[recipe.objective](recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The objective of a run, and the further inputs that it reads."""

    objective: Objective = CROSS_ENTROPY
    scored: Objective = CROSS_ENTROPY
    """The objective that scores held-out text. Distillations use cross-entropy, which compares across runs."""
    read_training_answers: AnswerReader | None = None
    """Further arrays of training answers, for the objective."""
    read_validation_answers: AnswerReader | None = None
    """Further arrays of held-out answers."""
    read_rows: RowReader | None = None
    """Further arrays of each position of a training row."""
    on_policy: OnPolicy | None = None
    """Rewrites answers in some steps. None = nothing is rewritten."""

    def rows(self, batch: Batch, engine: Engine, cursor: int) -> Batch:
        """Return the text that a step from sample `cursor` on reads, of this rank's part."""
        return batch if self.on_policy is None else self.on_policy.rows(batch, engine, cursor)


TEXT = Task()
"""Cross-entropy on plain text."""


LIKELIEST, LOGS = "teacher likeliest", "teacher log-probabilities"
"""Names in `Batch.more` of the teacher's stored distributions.

The likeliest tokens are (B, S, K). Their log-probabilities are (B, S, K + 1), that of all other tokens last.
"""


class AsksTeacher(Protocol):
    """A teacher model in memory."""

    @property
    def engine(self) -> Engine:
        """The teacher over the ranks."""

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Prepare the passes of a step over these micro-batches. All ranks call this together."""

    def against(
        self, predictions: Predictions, batch: Batch, scale: Tensor | None, form: Divergence
    ) -> DistillationLoss:  # fmt: skip
        """Return the loss of a student's predictions of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """The mean divergence over valid targets, mixed with their cross-entropy."""

    form: Divergence
    teacher: AsksTeacher | None = None
    """None = batches carry stored log-probabilities."""
    shared: int = 0
    """Tokens that both models know, when vocabularies are padded differently. 0 = all."""
    by_position = True
    figures = TAUGHT

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Let a teacher in memory prepare the step."""
        if self.teacher is not None:
            self.teacher.begin_step(batches)

    def count(self, batch: Batch) -> float:
        """Return the number of valid targets."""
        return batch.valid

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Return (3,) fp32: the sum in nats, then divergence and cross-entropy alone."""
        if self.teacher is None:
            ids, logs = (batch.more[name].flatten(0, 1) for name in (LIKELIEST, LOGS))
            divergence = predictions.divergence(
                KnownTop(ids.long(), logs), batch.targets, scale, self.form, self.shared
            )
        else:
            divergence = self.teacher.against(predictions, batch, scale, self.form)
        return torch.cat((divergence.loss.reshape(1), divergence.parts))


def divergence_of(recipe: Recipe) -> Divergence:
    """Return the divergence that a recipe names."""
    return Divergence(
        beta=recipe.distillation_beta, temperature=recipe.distillation_temperature, hard=recipe.distillation_hard
    )
