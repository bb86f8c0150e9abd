"""Loss, perplexity and bits per byte on held-out text; of pairs, loss and rewards."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor

from meshwright.parallel import Engine
from meshwright.training.batches import Batch, valid_tokens
from meshwright.training.step import CROSS_ENTROPY, EVALUATION, MicroPass, Objective
from meshwright.training.watch import EvalMetrics


def evaluate(
    engine: Engine,
    batches: Iterable[Batch],
    *,
    step: int,
    tokens_per_byte: float,
    objective: Objective = CROSS_ENTROPY,
) -> EvalMetrics:
    """Mean loss a token over all valid targets; bits per byte = loss / ln 2 x tokens per byte of the held-out text. Of
    another objective its own mean, and what it reports.

    Bits per byte compare models with different tokenizers; nats per token do not. A pipeline is given as many batches
    at once as it has ranks; the host waits for the device once, at the end.
    """
    started = time.perf_counter()
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
    )


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


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """Inside, the model drops nothing out and keeps nothing for a backward pass."""
    training = engine.model.training
    try:
        engine.eval()
        with torch.no_grad():
            yield
    finally:
        if training:
            engine.train()


def runs(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """`size` batches at a time, as long as there are any."""
    rest = iter(batches)
    while some := list(islice(rest, size)):
        yield some
