"""Loss, perplexity and bits per byte on held-out text; of pairs, loss and rewards."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.data.corpus import MixedStream, Stream
from meshwright.data.mixed_rows import MixedRows, limits
from meshwright.data.numbered_rows import NumberedRows
from meshwright.data.rendering import ROLES
from meshwright.data.sample_rows import SampleRows, trained_roles
from meshwright.parallel import Engine
from meshwright.training.batches import WHOLE, Batch, OfAnswers, Share, held_out, valid_tokens
from meshwright.training.role_loss import RowPass
from meshwright.training.step import CROSS_ENTROPY, EVALUATION, MicroPass, Objective
from meshwright.training.watch import EvalMetrics, RoleLoss

One = TypeVar("One")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutRows:
    """Which rows are scored, by which objective, and how they are read."""

    rows: NumberedRows
    stream: Stream
    """Where they come from."""
    document_mask: bool
    at_once: int
    """Of each rank, in one forward pass."""
    limit: int
    """At most so many, spread evenly; 0 = all."""
    objective: Objective = CROSS_ENTROPY
    of_answers: OfAnswers | None = None
    """What the objective reads of answers."""

    @property
    def parts(self) -> tuple["HeldOutRows", ...]:
        """Those of each source of a mixture, which has its share of the limit; else itself."""
        if not isinstance(self.rows, MixedRows) or not isinstance(self.stream, MixedStream):
            return (self,)
        each = zip(self.rows.rows, self.stream.parts, limits(self.stream.weights, self.limit), strict=True)
        return tuple(replace(self, rows=rows, stream=stream, limit=limit) for rows, stream, limit in each)

    @property
    def items(self) -> Sequence[int] | None:
        """Which item each row is of: rows of one conversation are one. None = each row is one."""
        return self.rows.rows_of_file(self.limit) if isinstance(self.rows, SampleRows) else None

    def batches(self, device: torch.device, share: Share = WHOLE, *, by_role: bool = False) -> Iterator[Batch]:
        """This rank's part of them; `by_role`: with who says each target."""
        return held_out(
            self.rows, device, rows=self.at_once, limit=self.limit, document_mask=self.document_mask, share=share,
            of_answers=self.of_answers, by_role=by_role,
        )  # fmt: skip

    def evaluate(self, engine: Engine, device: torch.device, share: Share = WHOLE, *, step: int = 0) -> EvalMetrics:
        """Loss, perplexity and bits per byte; by role where several roles are trained."""
        by_role = self.objective is CROSS_ENTROPY and len(trained_roles(self.stream)) > 1
        per_byte = self.stream.num_tokens / max(1, self.stream.num_bytes)
        batches = self.batches(device, share, by_role=by_role)
        return evaluate(engine, batches, step=step, tokens_per_byte=per_byte, objective=self.objective, by_role=by_role)


def evaluate(
    engine: Engine, batches: Iterable[Batch], *, step: int, tokens_per_byte: float,
    objective: Objective = CROSS_ENTROPY, by_role: bool = False,
) -> EvalMetrics:  # fmt: skip
    """Mean loss a token over all valid targets; bits per byte = loss / ln 2 x tokens per byte of the held-out text. Of
    another objective its own mean, and what it reports.

    Bits per byte compare models with different tokenizers; nats per token do not. A pipeline is given as many batches
    at once as it has ranks; the host waits for the device once, at the end. `by_role`: also the loss of each role, for
    which batches say who says what (batches.held_out).
    """
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
        roles=_roles(nats, counts) if by_role else None,
    )


def _roles(nats: Sequence[float], counts: Sequence[float]) -> dict[str, RoleLoss]:
    """Of the roles that said something."""
    return {
        name: RoleLoss(loss=own / count, tokens=round(count))
        for name, own, count in zip(ROLES, nats, counts, strict=True)
        if count
    }


def summed_loss(
    engine: Engine, batches: Iterable[Batch], objective: Objective = CROSS_ENTROPY
) -> tuple[Tensor, Tensor]:
    """An objective's loss and figures summed over all ranks (1 + F,), what they are divided by and the valid targets
    (2,), float64 each. Like a training step this runs on fake tensors too: nothing is read."""
    total, counted = torch.zeros(1 + len(objective.figures), dtype=torch.float64), [0.0, 0.0]
    with evaluating(engine):
        for some in runs(batches, engine.mesh["pp"].size):
            counted[0] += sum(objective.count(one) for one in some)
            counted[1] += valid_tokens(some)
            passes = [MicroPass(one, EVALUATION, objective) for one in some]
            loss = engine.evaluate(passes)
            figures = torch.stack([one.figures for one in passes]).sum(0)
            total = total.to(loss.device) + torch.cat((loss.reshape(1), figures))
        totals = torch.tensor(counted, dtype=torch.float64, device=total.device)
        return engine.sum_loss(total), engine.mesh["data"].all_reduce(totals)


def role_losses(engine: Engine, batches: Iterable[Batch]) -> Tensor:
    """(2, R) float64 of all ranks: nats, and valid targets, of each of rendering.ROLES."""
    total = torch.zeros(2, len(ROLES), dtype=torch.float64)
    with evaluating(engine):
        for some in runs(batches, engine.mesh["pp"].size):
            passes = [RowPass(one) for one in some]
            engine.evaluate(passes)
            found = torch.stack([one.found.sum(1, dtype=torch.float64) for one in passes]).sum(0)
            total = total.to(found.device) + found
        return engine.sum_loss(total)


def row_losses(engine: Engine, batches: Iterable[Batch]) -> Tensor:
    """(2, B, R) float64 on the host, of the rows of one device's batches: nats, and valid targets."""
    with evaluating(engine):
        found = []
        for batch in batches:
            one = RowPass(batch)
            engine.evaluate([one])
            found.append(one.found.double().cpu())
        return torch.cat(found, dim=1) if found else torch.zeros(2, 0, len(ROLES), dtype=torch.float64)


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """Inside, nothing is dropped out, and nothing is kept for a backward pass."""
    training = engine.model.training
    try:
        engine.eval()
        with torch.no_grad():
            yield
    finally:
        if training:
            engine.train()


def runs(batches: Iterable[One], size: int) -> Iterator[list[One]]:
    """`size` batches at a time, as long as there are any."""
    rest = iter(batches)
    while some := list(islice(rest, size)):
        yield some
