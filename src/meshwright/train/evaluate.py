"""Loss, perplexity and bits per byte on held-out text."""

import math
import time
from collections.abc import Iterable

import torch

from meshwright.parallel import Engine
from meshwright.train.batches import Batch
from meshwright.train.step import EVALUATION, MicroPass
from meshwright.train.watch import EvalMetrics


def evaluate(engine: Engine, batches: Iterable[Batch], *, step: int, tokens_per_byte: float) -> EvalMetrics:
    """Mean loss a token over all valid targets; bits per byte = loss / ln 2 x tokens per byte of the held-out text.

    Bits per byte compare models with different tokenizers; nats per token do not.
    """
    started = time.perf_counter()
    training = engine.model.training
    total, tokens = 0.0, 0
    try:
        engine.eval()
        with torch.no_grad():
            for batch in batches:
                found = engine.evaluate(MicroPass(batch, EVALUATION))
                total += engine.sum_loss(found.double()).item()
                tokens += int(engine.total(batch.valid, batch.tokens.device).item())
    finally:
        if training:
            engine.train()
    loss = total / max(1, tokens)
    return EvalMetrics(
        step=step,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=loss / math.log(2) * tokens_per_byte,
        tokens=tokens,
        seconds=time.perf_counter() - started,
    )
