"""The held-out loss of a mixture: the loss of each source, and their mean by weight."""

import math
from collections.abc import Callable, Mapping

from meshwright.data.corpus.corpus import MixedStream, Stream, TokenStream
from meshwright.data.sequences.numbered_rows import divide_limit
from meshwright.spec import Data
from meshwright.training.step.watch import EvalMetrics, RoleLoss, SourceScore

Score = Callable[[Data, TokenStream, int], EvalMetrics]
"""(settings, held-out stream, row limit; 0 = all) -> its loss."""


def score_sources(data: Data, stream: Stream, limit: int, score: Score) -> EvalMetrics | None:
    """Return the loss of the held-out text. None = nothing is held out.

    Each source of a mixture gives rows by its weight, at least one. Loss and bytes per token are means by weight, so
    they follow what is trained and not how large the files are.
    """
    if isinstance(stream, TokenStream):
        return _scored(data, stream, limit, score)
    parts = zip(data.sources, stream.parts, divide_limit(stream.weights, limit), strict=True)
    scores = [_scored(source, part, most, score) for source, part, most in parts]
    return _weighted_mean(scores, data, stream) if any(scores) else None


def _scored(data: Data, stream: TokenStream, limit: int, score: Score) -> EvalMetrics | None:
    if stream.num_tokens < 2:
        return None
    metrics = score(data, stream, limit)
    return metrics if metrics.tokens else None


def _weighted_mean(scores: list[EvalMetrics | None], data: Data, stream: MixedStream) -> EvalMetrics:
    """Return the mean by weight over the sources that have held-out rows."""
    scored = {source.path: score for source, score in zip(data.mixture, scores, strict=True) if score is not None}
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
