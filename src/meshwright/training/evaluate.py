"""Loss, perplexity and bits per byte on held-out text."""

import math
import time
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from meshwright.parallel import Engine
from meshwright.training.batches import Batch, valid_tokens
from meshwright.training.step import EVALUATION, MicroPass
from meshwright.training.watch import EvalMetrics


def evaluate(engine: Engine, batches: Iterable[Batch], *, step: int, tokens_per_byte: float) -> EvalMetrics:
    """Mean loss a token over all valid targets; bits per byte = loss / ln 2 x tokens per byte of the held-out text.

    Bits per byte compare models with different tokenizers; nats per token do not. A pipeline is given as many batches
    at once as it has ranks; the host waits for the device once, at the end.
    """
    started = time.perf_counter()
    loss, counted = summed_loss(engine, batches)
    tokens = int(counted.item())
    mean = loss.item() / max(1, tokens)
    return EvalMetrics(
        step=step,
        loss=mean,
        perplexity=math.exp(min(mean, 700.0)),
        bits_per_byte=mean / math.log(2) * tokens_per_byte,
        tokens=tokens,
        seconds=time.perf_counter() - started,
    )


def summed_loss(engine: Engine, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """Loss summed over all valid targets of all ranks, and their number, () float64 each. Like a training step this
    runs on fake tensors too: nothing is read."""
    training = engine.model.training
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    try:
        engine.eval()
        with torch.no_grad():
            for some in _runs(batches, engine.mesh["pp"].size):
                tokens += valid_tokens(some)
                total = total.to(some[0].tokens.device) + engine.evaluate([MicroPass(one, EVALUATION) for one in some])
            return engine.sum_loss(total), engine.total(tokens, total.device)
    finally:
        if training:
            engine.train()


def _runs(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """`size` batches at a time, as long as there are any."""
    rest = iter(batches)
    while some := list(islice(rest, size)):
        yield some
