"""How far a model's predictions move when some of its matrices are rounded, measured on text.

Each group of matrices that read the same is rounded by itself, to the fewest bits and to nearest: the divergence of the
model with that group is its sensitivity. With other bits the divergence is taken to follow the square of the weights'
error: it is second order in small changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from meshwright.compress.bit_budget import BitChoice
from meshwright.compress.input_folds import input_groups
from meshwright.compress.layer_inputs import run
from meshwright.compress.quality import token_rows
from meshwright.kernels.weight_codes import quantize_matrix
from meshwright.model import Transformer
from meshwright.model.quantized_weights import quantizable
from meshwright.model.transformer import skeleton
from meshwright.spec.quantization_schemes import Scheme
from meshwright.training.batches import Batch


@dataclass(frozen=True, slots=True)
class MeasuredGroup:
    """Matrices that read the same inputs."""

    names: tuple[str, ...]
    choices: tuple[BitChoice, ...]
    """What each scheme of a ladder costs."""


@torch.no_grad()
def measured_groups(
    model: Transformer, names: Sequence[str], ladder: Sequence[Scheme], batches: Sequence[Batch]
) -> list[MeasuredGroup]:
    """All groups of these matrices, measured on the batches. PlanError for weights that are not finite."""
    sizes, before = quantizable(model.shape), [run(model, batch) for batch in batches]
    beside = _beside(model)
    found = []
    for group in input_groups(names):
        errors = [sum(_put(model, beside, name, scheme) for name in group) for scheme in reversed(ladder)]
        errors.reverse()  # the last one put is that of the fewest bits
        lost = _divergence(model, beside, before, batches)
        for name in group:
            _assign(beside, name, model.get_parameter(name))
        found.append(
            MeasuredGroup(
                group,
                tuple(
                    BitChoice(sum(_bytes(sizes[name], scheme) for name in group), lost * error / (errors[0] or 1.0))
                    for scheme, error in zip(ladder, errors, strict=True)
                ),
            )
        )
    return found


def _beside(model: Transformer) -> Transformer:
    """Another model with the same tensors."""
    found = skeleton(model.shape).eval()
    found.load_state_dict(model.state_dict(), assign=True)
    if model.shape.positions == "rope":
        found.inverse = model.inverse
    return found.requires_grad_(False)


def _put(model: Transformer, beside: Transformer, name: str, scheme: Scheme) -> float:
    """Give a matrix rounded by a scheme to the model beside; the squared error of its weights."""
    weight = model.get_parameter(name)
    rounded = quantize_matrix(name, weight, scheme).dequantized()
    _assign(beside, name, rounded.to(weight.dtype))
    return float((rounded - weight.float()).square().sum())


def _assign(model: Transformer, name: str, weight: Tensor) -> None:
    where, _, leaf = name.rpartition(".")
    model.get_submodule(where).register_parameter(leaf, nn.Parameter(weight.detach(), requires_grad=False))


def _divergence(
    model: Transformer, beside: Transformer, before: Sequence[Tensor], batches: Sequence[Batch]
) -> float:  # fmt: skip
    """Mean KL(model || beside) over the targets of the batches; never below 0."""
    rows = [
        divergence
        for states, batch in zip(before, batches, strict=True)
        for divergence, *_ in token_rows(model, beside, states, run(beside, batch), batch.targets)
    ]
    return max(0.0, float(torch.cat(rows).double().mean()))


def _bytes(size: tuple[int, ...], scheme: Scheme) -> int:
    *stack, rows, columns = size
    parts = scheme.sizes(rows, columns, stack).values()
    return sum(prod(dims) * getattr(torch, kind).itemsize for dims, kind in parts)
