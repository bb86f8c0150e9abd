"""Comparison of a model before and after compression: shift of its predictions, and output error of each matrix.

Sensitivity: each group of matrices that share inputs is rounded alone, to nearest and to the fewest bits. The
divergence of the model is the group's sensitivity. For other bit widths the divergence is scaled by the squared error
of the weights, since it is second order in small changes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compress.bit_budget import BitChoice
from meshwright.compress.input_scales import input_groups
from meshwright.compress.layer_inputs import observe_inputs, run
from meshwright.kernels.experts.experts import Counts
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model import Transformer
from meshwright.model.layers import Linear
from meshwright.model.quantized_weights import quantizable
from meshwright.model.transformer import skeleton
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.training.step.batches import Batch

MAX_LOGITS = 2**24
"""Logits of each model in memory at once."""
SHARES = (0.0, *(step / 20 for step in range(1, 20)), 0.98, 0.99, 0.995, 0.999, 1.0)
"""Quantiles of the divergence that are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Predictions of one model compared with another's."""

    tokens: int
    kl: float
    """Mean KL(before || after) over tokens, in nats."""
    kl_error: float
    """Standard error of `kl` over tokens."""
    kl_p99: float
    """99th percentile of the KL over tokens."""
    top1: float
    """Share of tokens whose most likely prediction is equal in both models."""
    perplexity_before: float
    perplexity_after: float
    kl_quantiles: tuple[tuple[float, float], ...] = ()
    """(share of tokens, largest KL among them), by rising share."""


@torch.no_grad()
def compare(before: Transformer, after: Transformer, batches: Iterable[Batch]) -> Quality:
    """Compare two models over all valid targets of the batches, at least one."""
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
        perplexity_before=_perplexity(float(first.mean())),
        perplexity_after=_perplexity(float(second.mean())),
        kl_quantiles=tuple((share, _quantile(ordered, share)) for share in SHARES),
    )


def _quantile(ordered: Tensor, share: float) -> float:
    """Return the smallest entry that is at least as large as this share of all entries."""
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])


def _perplexity(loss: float) -> float:
    # exp(710) overflows a double.
    return math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.inf


def _rows(
    before: Transformer, after: Transformer, batches: Iterable[Batch]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    for batch in batches:
        yield from token_rows(before, after, run(before, batch), run(after, batch), batch.targets)


def token_rows(
    before: Transformer, after: Transformer, first: Tensor, second: Tensor, targets: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield KL, agreement, and loss before and after, for slices of tokens (N,) each, fp32 on the host.

    Inputs are the last hidden states (B, S, D) of both models. Only valid targets (B, S) count.
    """
    # In slices: the logits of all tokens may need more memory than the model itself.
    size, flat_targets = max(1, MAX_LOGITS // before.shape.vocab), targets.flatten()
    states = first.flatten(0, 1), second.flatten(0, 1)
    for indices in (flat_targets >= 0).nonzero().squeeze(1).split(size):
        models_and_states = zip((before, after), states, strict=True)
        p, q = (_log_probabilities(model, hidden[indices]) for model, hidden in models_and_states)
        divergence = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
        target = flat_targets[indices].unsqueeze(1)
        columns = (
            divergence,
            (p.argmax(-1) == q.argmax(-1)).float(),
            -p.gather(1, target)[:, 0],
            -q.gather(1, target)[:, 0],
        )
        yield tuple(column.cpu() for column in columns)  # type: ignore[misc]  # four columns, as annotated


def _log_probabilities(model: Transformer, hidden: Tensor) -> Tensor:
    logits: Tensor = model.kernels.linear(hidden, model.head_weight)
    return logits.float().log_softmax(-1)


@torch.no_grad()
def output_errors(
    before: Transformer, after: Transformer, names: Iterable[str], batches: Iterable[Batch]
) -> Mapping[str, float]:
    """Return |y - y'|^2 / |y|^2 of each quantized layer but experts, on its inputs in the model before."""
    sums: dict[str, Tensor] = {}
    layers = [name for name in names if name.endswith(".weight")]

    def seen(name: str, x: Tensor, _: Counts | None) -> None:
        where = name.removesuffix(".weight")
        original, compressed = (model.get_submodule(where) for model in (before, after))
        assert isinstance(original, Linear) and isinstance(compressed, Linear)
        y = original.kernels.linear(x, original.weight).float()
        codes = compressed.quantized
        quantized = (
            # A file that is read as restored weights has no codes.
            compressed.kernels.linear(x, compressed.weight)
            if codes is None
            else compressed.kernels.quantized_linears(x, [codes.matrix], [None])[0]
        ).float()
        # Squares of many tokens are added in fp64: a sum in fp32 would stop growing.
        error = torch.stack(((y - quantized).square().sum(), y.square().sum())).double()
        sums[name] = sums[name] + error if name in sums else error

    with observe_inputs(before, layers, seen):
        for batch in batches:
            run(before, batch)
    return {name: float(wrong / whole) if whole else 0.0 for name, (wrong, whole) in sums.items()}


@dataclass(frozen=True, slots=True)
class MeasuredGroup:
    """Matrices that share inputs, and the cost of each way to store them."""

    names: tuple[str, ...]
    choices: tuple[BitChoice, ...]
    """Bytes and divergence for each scheme of the ladder."""


@torch.no_grad()
def measure_groups(
    model: Transformer, names: Sequence[str], ladder: Sequence[Scheme], batches: Sequence[Batch]
) -> list[MeasuredGroup]:
    """Measure all groups of these matrices on the batches. Raises PlanError for weights that are not finite."""
    sizes, before = quantizable(model.shape), [run(model, batch) for batch in batches]
    twin = _make_twin(model)
    groups = []
    # One pass over the text per group, at the fewest bits. Other schemes scale with their weight error.
    for group in input_groups(names):
        errors = [sum(_round(model, twin, name, scheme) for name in group) for scheme in reversed(ladder)]
        # The ladder ran backwards, so the matrices now have the fewest bits.
        errors.reverse()
        lost = _divergence(model, twin, before, batches)
        for name in group:
            _assign(twin, name, model.get_parameter(name))
        groups.append(
            MeasuredGroup(
                group,
                tuple(
                    BitChoice(sum(_bytes(sizes[name], scheme) for name in group), lost * error / (errors[0] or 1.0))
                    for scheme, error in zip(ladder, errors, strict=True)
                ),
            )
        )
    return groups


def _make_twin(model: Transformer) -> Transformer:
    """Return a second model that shares the tensors."""
    twin = skeleton(model.shape).eval()
    # Assigned, not copied: the twin takes memory only for a matrix that it has rounded.
    twin.load_state_dict(model.state_dict(), assign=True)
    if model.shape.positions == "rope":
        twin.inverse = model.inverse
    return twin.requires_grad_(False)


def _round(model: Transformer, twin: Transformer, name: str, scheme: Scheme) -> float:
    """Assign a matrix rounded by a scheme to the twin, and return the squared error of its weights."""
    weight = model.get_parameter(name)
    rounded = quantize_matrix(name, weight, scheme).dequantized()
    _assign(twin, name, rounded.to(weight.dtype))
    return float((rounded - weight.float()).square().sum())


def _assign(model: Transformer, name: str, weight: Tensor) -> None:
    where, _, leaf = name.rpartition(".")
    model.get_submodule(where).register_parameter(leaf, nn.Parameter(weight.detach(), requires_grad=False))


def _divergence(model: Transformer, twin: Transformer, before: Sequence[Tensor], batches: Sequence[Batch]) -> float:
    """Return the mean KL(model || twin) over the targets of the batches, at least 0."""
    rows = [
        divergence
        for states, batch in zip(before, batches, strict=True)
        for divergence, *_ in token_rows(model, twin, states, run(twin, batch), batch.targets)
    ]
    # Rounding may leave a mean just below 0.
    return max(0.0, float(torch.cat(rows).double().mean()))


def _bytes(size: tuple[int, ...], scheme: Scheme) -> int:
    *stack, rows, columns = size
    parts = scheme.sizes(rows, columns, stack).values()
    return sum(prod(dims) * getattr(torch, kind).itemsize for dims, kind in parts)
