"""A model before and after, on held-out text: how far its predictions moved, and which matrix is to blame."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.compress.layer_inputs import reading, run
from meshwright.kernels.experts import Counts
from meshwright.model import Transformer
from meshwright.model.linear import Linear
from meshwright.training.batches import Batch

LOGITS = 2**24
"""Logits that are alive at once, of each model."""
SHARES = (0.0, *(place / 20 for place in range(1, 20)), 0.98, 0.99, 0.995, 0.999, 1.0)
"""Of tokens, in order of their divergence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of one model's predictions against another's."""

    tokens: int
    kl: float
    """Mean over tokens of KL(before || after), in nats."""
    kl_error: float
    """Its standard error over tokens."""
    kl_p99: float
    """Of 99 % of tokens it is no larger."""
    top1: float
    """Share of tokens for which both find the same one likeliest."""
    perplexity_before: float
    perplexity_after: float
    kl_quantiles: tuple[tuple[float, float], ...] = ()
    """Shares of tokens, and the KL that theirs is no larger than."""


@torch.no_grad()
def compare(before: Transformer, after: Transformer, batches: Iterable[Batch]) -> Quality:
    """Over all valid targets of the batches, of which there is one at least."""
    rows = [torch.cat(parts) for parts in zip(*_rows(before, after, batches), strict=True)]
    divergence, agreed, first, second = (row.double() for row in rows)
    count = len(divergence)
    deviation = float(divergence.std()) if count > 1 else 0.0
    ordered = divergence.sort().values
    return Quality(
        tokens=count,
        kl=float(divergence.mean()),
        kl_error=deviation / math.sqrt(count),
        kl_p99=_quantile(ordered, 0.99),
        top1=float(agreed.mean()),
        perplexity_before=math.exp(min(float(first.mean()), 700.0)),
        perplexity_after=_perplexity(float(second.mean())),
        kl_quantiles=tuple((share, _quantile(ordered, share)) for share in SHARES),
    )


def _quantile(ordered: Tensor, share: float) -> float:
    """Of so large a share of the numbers none is larger."""
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.inf


def _rows(
    before: Transformer, after: Transformer, batches: Iterable[Batch]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    for batch in batches:
        yield from token_rows(before, after, run(before, batch), run(after, batch), batch.targets)


def token_rows(
    before: Transformer, after: Transformer, first: Tensor, second: Tensor, targets: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """KL, agreement, and nats before and after, of some tokens each (N,), fp32 on the host: of the last hidden states
    (B, S, D) of both models, where targets (B, S) are valid."""
    size, wanted = max(1, LOGITS // before.shape.vocab), targets.flatten()
    states = first.flatten(0, 1), second.flatten(0, 1)
    for some in (wanted >= 0).nonzero().squeeze(1).split(size):
        pair = zip((before, after), states, strict=True)
        p, q = (_log_probabilities(model, own[some]) for model, own in pair)
        divergence = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
        target = wanted[some].unsqueeze(1)
        found = (
            divergence,
            (p.argmax(-1) == q.argmax(-1)).float(),
            -p.gather(1, target)[:, 0],
            -q.gather(1, target)[:, 0],
        )
        yield tuple(one.cpu() for one in found)  # type: ignore[misc]  # four of them


def _log_probabilities(model: Transformer, hidden: Tensor) -> Tensor:
    logits: Tensor = model.kernels.linear(hidden, model.head_weight)
    return logits.float().log_softmax(-1)


@torch.no_grad()
def output_errors(
    before: Transformer, after: Transformer, names: Iterable[str], batches: Iterable[Batch]
) -> Mapping[str, float]:
    """|y - y'|^2 / |y|^2 of each quantized layer by itself, on what it reads in the model before; of experts there is
    none here."""
    sums: dict[str, Tensor] = {}
    layers = [name for name in names if name.endswith(".weight")]

    def seen(name: str, x: Tensor, _: Counts | None) -> None:
        where = name.removesuffix(".weight")
        one, other = (model.get_submodule(where) for model in (before, after))
        assert isinstance(one, Linear) and isinstance(other, Linear)
        y = one.kernels.linear(x, one.weight).float()
        codes = other.quantized
        quantized = (
            other.kernels.linear(x, other.weight)  # a file that is read as restored weights
            if codes is None
            else other.kernels.quantized_linears(x, [codes.matrix], [None])[0]
        ).float()
        found = torch.stack(((y - quantized).square().sum(), y.square().sum())).double()
        sums[name] = sums[name] + found if name in sums else found

    with reading(before, layers, seen):
        for batch in batches:
            run(before, batch)
    return {name: float(wrong / whole) if whole else 0.0 for name, (wrong, whole) in sums.items()}
