"""The held-out loss of a mixture: that of each source, and their mean by weight."""

import math
from collections.abc import Callable, Mapping

from meshwright.data.corpus import MixedStream, Stream, TokenStream
from meshwright.data.mixed_rows import limits
from meshwright.spec import Data
from meshwright.training.watch import EvalMetrics, RoleLoss, SourceScore

Score = Callable[[Data, TokenStream, int], EvalMetrics]
"""(settings, what is held out, at most so many rows; 0 = all) -> its loss."""


def score_sources(data: Data, stream: Stream, limit: int, score: Score) -> EvalMetrics | None:
    """The loss of what is held out; None where nothing is.

    Of a mixture each source gives rows by its weight, at least one. The loss and the bytes per token of all are means
    by weight, so that the number follows what is trained and not how large the files are.
    """
    if isinstance(stream, TokenStream):
        return _scored(data, stream, limit, score)
    parts = zip(data.sources, stream.parts, limits(stream.weights, limit), strict=True)
    each = [_scored(one, part, most, score) for one, part, most in parts]
    return _together(each, data, stream) if any(each) else None


def _scored(data: Data, stream: TokenStream, limit: int, score: Score) -> EvalMetrics | None:
    if stream.num_tokens < 2:
        return None
    found = score(data, stream, limit)
    return found if found.tokens else None


def _together(each: list[EvalMetrics | None], data: Data, stream: MixedStream) -> EvalMetrics:
    """The mean by weight over the sources that have something held out."""
    scored = {source.path: one for source, one in zip(data.mixture, each, strict=True) if one is not None}
    parts = [pair for pair, one in zip(zip(stream.parts, stream.weights, strict=True), each, strict=True) if one]
    heard = MixedStream(parts=tuple(part for part, _ in parts), weights=tuple(weight for _, weight in parts))
    loss = heard.mean([one.loss for one in scored.values()])
    first, pairs = next(iter(scored.values())), any(part.pairs for part in heard.parts)
    return EvalMetrics(
        step=first.step,
        loss=loss,
        perplexity=None if pairs else math.exp(min(loss, 700.0)),
        bits_per_byte=None if pairs else loss / math.log(2) / heard.bytes_per_token,
        figures={name: heard.mean([one.figures[name] for one in scored.values()]) for name in first.figures},
        roles=_roles([one.roles or {} for one in scored.values()], heard.weights) or None,
        tokens=sum(one.tokens for one in scored.values()),
        seconds=sum(one.seconds for one in scored.values()),
        sources=tuple(
            SourceScore(path=path, loss=one.loss, bits_per_byte=one.bits_per_byte, tokens=one.tokens)
            for path, one in scored.items()
        ),
    )


def _roles(each: list[Mapping[str, RoleLoss]], weights: tuple[float, ...]) -> dict[str, RoleLoss]:
    """Of each role the mean by weight over the sources that have it."""
    found = {}
    for name in dict.fromkeys(name for roles in each for name in roles):
        some = [(weight, roles[name]) for weight, roles in zip(weights, each, strict=True) if name in roles]
        loss = sum(weight * one.loss for weight, one in some) / sum(weight for weight, _ in some)
        found[name] = RoleLoss(loss=loss, tokens=sum(one.tokens for _, one in some))
    return found
