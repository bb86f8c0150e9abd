"""The held-out loss of a run: of its text, or of each source of a mixture and of all by their weights."""

import math
from dataclasses import replace

import torch

from meshwright.data import Corpus
from meshwright.data.corpus import MixedStream, TokenStream
from meshwright.data.mixed_rows import limits
from meshwright.data.numbered_rows import numbered_rows
from meshwright.parallel import Engine
from meshwright.spec import Data, Plan
from meshwright.training.batches import Share, held_out
from meshwright.training.evaluate import evaluate
from meshwright.training.watch import EvalMetrics, SourceScore


def score(
    engine: Engine, plan: Plan, corpus: Corpus, device: torch.device, *, share: Share, step: int
) -> EvalMetrics | None:
    """The loss of `recipe.eval_sequences` held-out rows; None where nothing is held out.

    Of a mixture each source gives rows by its weight, at least one. The loss and the bytes per token of all are means
    by weight, so that the number follows what is trained and not how large the files are.
    """
    recipe, stream = plan.recipe, corpus.validation

    def one(data: Data, part: TokenStream, limit: int) -> EvalMetrics | None:
        if part.num_tokens < 2:
            return None
        batches = held_out(
            numbered_rows(data, recipe, corpus, part, shuffle=False),
            device,
            rows=plan.layout.micro_batch_of(recipe.global_batch),
            limit=limit,
            document_mask=recipe.document_mask,
            share=share,
        )
        found = evaluate(engine, batches, step=step, tokens_per_byte=part.num_tokens / max(1, part.num_bytes))
        return found if found.tokens else None

    if isinstance(stream, TokenStream):
        return one(plan.data, stream, recipe.eval_sequences)
    most = limits(stream.weights, recipe.eval_sequences)
    parts = zip(plan.data.sources, stream.parts, most, strict=True)
    scores = {data.path: found for data, part, limit in parts if (found := one(data, part, limit))}
    return _together(scores, plan.data, stream) if scores else None


def _together(scores: dict[str, EvalMetrics], data: Data, stream: MixedStream) -> EvalMetrics:
    """The mean by weight over the sources that have something held out."""
    each = [scores.get(source.path) for source in data.mixture]
    loss = stream.mean([one.loss if one else 0.0 for one in each])
    return replace(
        next(iter(scores.values())),
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=loss / math.log(2) / stream.bytes_per_token,
        tokens=sum(one.tokens for one in scores.values()),
        seconds=sum(one.seconds for one in scores.values()),
        sources=tuple(
            SourceScore(path=path, loss=one.loss, bits_per_byte=one.bits_per_byte, tokens=one.tokens)
            for path, one in scores.items()
        ),
    )
