"""Loss, perplexity and bits per byte on held-out text, also by source and role; loss and rewards of pairs.

Letters: B rows, R roles.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar, final

import torch
from torch import Tensor

from meshwright.data.chat.rendering import ROLES
from meshwright.data.corpus.corpus import MixedStream, Stream, TokenStream
from meshwright.data.sequences.numbered_rows import MixedRows, NumberedRows, divide_limit
from meshwright.data.sequences.sample_rows import SampleRows, trained_roles
from meshwright.model.transformer import Predictions
from meshwright.parallel import Engine
from meshwright.spec import Data
from meshwright.training.step.batches import WHOLE, AnswerReader, Batch, Share, forms, held_out_batches, valid_tokens
from meshwright.training.step.step import CROSS_ENTROPY, EVALUATION, MicroPass, Objective
from meshwright.training.step.watch import EvalMetrics, RoleLoss, SourceScore

Element = TypeVar("Element")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutRows:
    """The rows to score, the objective that scores them, and how they are read."""

    rows: NumberedRows
    stream: Stream
    """Source of the rows."""
    document_mask: bool
    at_once: int
    """Rows of each rank per forward pass."""
    limit: int
    """At most that many rows, spread evenly. 0 = all."""
    objective: Objective = CROSS_ENTROPY
    read_answers: AnswerReader | None = None
    """Further arrays of the answers, for the objective."""

    @property
    def parts(self) -> tuple["HeldOutRows", ...]:
        """The rows of each source of a mixture, with its share of the limit; else only this one."""
        if not isinstance(self.rows, MixedRows) or not isinstance(self.stream, MixedStream):
            return (self,)
        sources = zip(self.rows.rows, self.stream.parts, divide_limit(self.stream.weights, self.limit), strict=True)
        return tuple(replace(self, rows=rows, stream=stream, limit=limit) for rows, stream, limit in sources)

    @property
    def items(self) -> Sequence[int] | None:
        """Item number of each row. Rows of one conversation are one item. None = each row is an item."""
        return self.rows.rows_of_file(self.limit) if isinstance(self.rows, SampleRows) else None

    def batches(self, device: torch.device, share: Share = WHOLE, *, by_role: bool = False) -> Iterator[Batch]:
        """Yield this rank's part of the rows. `by_role` adds the role that says each target."""
        return held_out_batches(
            self.rows, device, rows=self.at_once, limit=self.limit, document_mask=self.document_mask, share=share,
            read_answers=self.read_answers, by_role=by_role,
        )  # fmt: skip

    def evaluate(self, engine: Engine, device: torch.device, share: Share = WHOLE, *, step: int = 0) -> EvalMetrics:
        """Return loss, perplexity and bits per byte, also per role when several roles are trained."""
        by_role = self.objective is CROSS_ENTROPY and len(trained_roles(self.stream)) > 1
        per_byte = self.stream.num_tokens / max(1, self.stream.num_bytes)
        batches = self.batches(device, share, by_role=by_role)
        return evaluate(engine, batches, step=step, tokens_per_byte=per_byte, objective=self.objective, by_role=by_role)


def evaluate(
    engine: Engine, batches: Iterable[Batch], *, step: int, tokens_per_byte: float,
    objective: Objective = CROSS_ENTROPY, by_role: bool = False,
) -> EvalMetrics:  # fmt: skip
    """Return the mean loss per token over all valid targets, with bits per byte of the held-out text.

    Bits per byte = loss / ln 2 x tokens per byte. They compare models with different tokenizers; nats per token do not.
    Another objective gives its own mean and figures. A pipeline gets as many batches at once as it has ranks, and the
    host waits for the device once, at the end. `by_role` adds the loss of each role, which batches must carry.
    """
    # The host reads the sums once, at the end, so the time is that of the device too.
    started = time.perf_counter()
    figures: list[float] = []
    nats: list[float] = []
    counts: list[float] = []
    if by_role:
        nats, counts = role_losses(engine, batches).tolist()
        mean, tokens = sum(nats) / max(1.0, sum(counts)), round(sum(counts))
    else:
        sums, counted = summed_loss(engine, batches, objective)
        count, tokens = counted.tolist()
        mean, *figures = (sums / max(1.0, count)).tolist()
    text = objective is CROSS_ENTROPY
    return EvalMetrics(
        step=step,
        loss=mean,
        perplexity=math.exp(min(mean, 700.0)) if text else None,
        bits_per_byte=mean / math.log(2) * tokens_per_byte if text else None,
        tokens=int(tokens),
        seconds=time.perf_counter() - started,
        figures=dict(zip(objective.figures, figures, strict=True)),
        roles={
            name: RoleLoss(loss=total / count, tokens=round(count))
            for name, total, count in zip(ROLES, nats, counts, strict=True)
            if count
        }
        if by_role
        else None,
    )


def summed_loss(
    engine: Engine, batches: Iterable[Batch], objective: Objective = CROSS_ENTROPY
) -> tuple[Tensor, Tensor]:
    """Return an objective's sums over all ranks: loss and figures (1 + F,), and (2,) divisor and valid targets.

    Both are float64. Nothing is read from the device, so this runs on fake tensors, as a training step does.
    """
    # float64: millions of tokens are summed, and fp32 would lose the last batches.
    total, counted = torch.zeros(1 + len(objective.figures), dtype=torch.float64), [0.0, 0.0]
    with evaluating(engine):
        # A pipeline is full only with as many micro-batches as it has stages.
        for group in group_batches(batches, engine.mesh["pp"].size):
            counted[0] += sum(objective.count(batch) for batch in group)
            counted[1] += valid_tokens(group)
            passes = [MicroPass(batch, EVALUATION, objective) for batch in group]
            loss = engine.evaluate(passes)
            figures = torch.stack([micro_pass.figures for micro_pass in passes]).sum(0)
            total = total.to(loss.device) + torch.cat((loss.reshape(1), figures))
        totals = torch.tensor(counted, dtype=torch.float64, device=total.device)
        return engine.sum_loss(total), engine.mesh["data"].all_reduce(totals)


def role_losses(engine: Engine, batches: Iterable[Batch]) -> Tensor:
    """Return (2, R) float64 over all ranks: nats and valid targets of each role in rendering.ROLES."""
    total = torch.zeros(2, len(ROLES), dtype=torch.float64)
    with evaluating(engine):
        for group in group_batches(batches, engine.mesh["pp"].size):
            passes = [RowPass(batch) for batch in group]
            engine.evaluate(passes)
            sums = torch.stack([row_pass.sums.sum(1, dtype=torch.float64) for row_pass in passes]).sum(0)
            total = total.to(sums.device) + sums
        return engine.sum_loss(total)


def row_losses(engine: Engine, batches: Iterable[Batch]) -> Tensor:
    """Return (2, B, R) float64 on the host: nats and valid targets of each row of one device's batches."""
    with evaluating(engine):
        sums = []
        for batch in batches:
            row_pass = RowPass(batch)
            engine.evaluate([row_pass])
            # Read per batch: rows may be many, and the device's memory is for the model.
            sums.append(row_pass.sums.double().cpu())
        return torch.cat(sums, dim=1) if sums else torch.zeros(2, 0, len(ROLES), dtype=torch.float64)


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """Switch dropout off and keep nothing for a backward pass within the context."""
    training = engine.model.training
    try:
        engine.eval()
        with torch.no_grad():
            yield
    finally:
        # Callers may themselves be evaluating.
        if training:
            engine.train()


def group_batches(batches: Iterable[Element], size: int) -> Iterator[list[Element]]:
    """Yield `size` batches at a time."""
    rest = iter(batches)
    while group := list(islice(rest, size)):
        yield group


@final
class RowLoss:
    """Cross-entropy as an objective that records `sums` (2, B, R) fp32: nats and targets of each row and role."""

    figures: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Return the sum in nats."""
        nats = -predictions.log_probabilities(batch.targets)
        roles = batch.more.get("roles", torch.zeros_like(batch.targets))
        nats_and_counts = torch.stack((nats, (batch.targets >= 0).float()))
        # A sum for each role: scattered adds have no fixed order on a GPU.
        self.sums = torch.stack([nats_and_counts.where(roles == role, 0.0).sum(2) for role in range(len(ROLES))], dim=2)
        return nats.sum()


class RowPass(MicroPass):
    """A micro-batch on its way through the stages. Only the last stage records sums."""

    def __init__(self, batch: Batch) -> None:
        self._row_loss = RowLoss()
        super().__init__(batch, EVALUATION, self._row_loss)

    def forms(self) -> dict[Hashable, MicroPass]:
        """Return the pass with and without documents, each with its own sums."""
        return {(*self.size, packed): RowPass(batch) for packed, batch in forms(self.batch).items()}

    def __copy__(self) -> "RowPass":
        """Return a copy with its own sums, for warm-ups."""
        return RowPass(self.batch)

    @property
    def sums(self) -> Tensor:
        """Nats and targets (2, B, R) fp32, of the stages of this rank."""
        rows, device = len(self.batch.tokens), self.batch.tokens.device
        return torch.zeros(2, rows, len(ROLES), device=device) if self._row_loss.sums is None else self._row_loss.sums


Score = Callable[[Data, TokenStream, int], EvalMetrics]
"""(settings, held-out stream, row limit; 0 = all) -> its loss."""


def score_sources(data: Data, stream: Stream, limit: int, score: Score) -> EvalMetrics | None:
    """Return the loss of the held-out text. None = nothing is held out.

    Each source of a mixture gives rows by its weight, at least one. Loss and bytes per token are means by weight, so
    they follow what is trained and not how large the files are.
    """
    if isinstance(stream, TokenStream):
        return _score_source(data, stream, limit, score)
    parts = zip(data.sources, stream.parts, divide_limit(stream.weights, limit), strict=True)
    scores = [_score_source(source, part, most, score) for source, part, most in parts]
    return _weighted_mean(scores, data, stream) if any(scores) else None


def _score_source(data: Data, stream: TokenStream, limit: int, score: Score) -> EvalMetrics | None:
    if stream.num_tokens < 2:
        return None
    metrics = score(data, stream, limit)
    return metrics if metrics.tokens else None


def _weighted_mean(scores: list[EvalMetrics | None], data: Data, stream: MixedStream) -> EvalMetrics:
    """Return the mean by weight over the sources that have held-out rows."""
    scored = {source.path: score for source, score in zip(data.mixture, scores, strict=True) if score is not None}
    # Sources without held-out rows have no weight in the mean.
    parts = [part for part, score in zip(zip(stream.parts, stream.weights, strict=True), scores, strict=True) if score]
    scored_stream = MixedStream(parts=tuple(part for part, _ in parts), weights=tuple(weight for _, weight in parts))
    loss = scored_stream.mean([score.loss for score in scored.values()])
    first, pairs = next(iter(scored.values())), any(part.pairs for part in scored_stream.parts)
    return EvalMetrics(
        step=first.step,
        loss=loss,
        perplexity=None if pairs else math.exp(min(loss, 700.0)),
        bits_per_byte=None if pairs else loss / math.log(2) / scored_stream.bytes_per_token,
        figures={
            name: scored_stream.mean([score.figures[name] for score in scored.values()]) for name in first.figures
        },
        roles=_role_means([score.roles or {} for score in scored.values()], scored_stream.weights) or None,
        tokens=sum(score.tokens for score in scored.values()),
        seconds=sum(score.seconds for score in scored.values()),
        sources=tuple(
            SourceScore(path=path, loss=score.loss, bits_per_byte=score.bits_per_byte, tokens=score.tokens)
            for path, score in scored.items()
        ),
    )


def _role_means(source_roles: list[Mapping[str, RoleLoss]], weights: tuple[float, ...]) -> dict[str, RoleLoss]:
    """Return the mean of each role by weight over the sources that have it."""
    means = {}
    for name in dict.fromkeys(name for roles in source_roles for name in roles):
        parts = [(weight, roles[name]) for weight, roles in zip(weights, source_roles, strict=True) if name in roles]
        loss = sum(weight * role.loss for weight, role in parts) / sum(weight for weight, _ in parts)
        means[name] = RoleLoss(loss=loss, tokens=sum(role.tokens for _, role in parts))
    return means
