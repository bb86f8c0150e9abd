"""Sensitivity: shift of a model's predictions when a group of its matrices is rounded, measured on text.

Each group of matrices that share inputs is rounded alone, to nearest and to the fewest bits. The divergence of the
model is the group's sensitivity. For other bit widths the divergence is scaled by the squared error of the weights,
since it is second order in small changes.
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
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model import Transformer
from meshwright.model.quantized_weights import quantizable
from meshwright.model.transformer import skeleton
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.training.step.batches import Batch


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
    # one pass over the text per group, at the fewest bits; other schemes scale with their weight error
    for group in input_groups(names):
        errors = [sum(_round(model, twin, name, scheme) for name in group) for scheme in reversed(ladder)]
        errors.reverse()  # the ladder ran backwards, so the matrices now have the fewest bits
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


def _divergence(
    model: Transformer, twin: Transformer, before: Sequence[Tensor], batches: Sequence[Batch]
) -> float:  # fmt: skip
    """Return the mean KL(model || twin) over the targets of the batches, at least 0."""
    rows = [
        divergence
        for states, batch in zip(before, batches, strict=True)
        for divergence, *_ in token_rows(model, twin, states, run(twin, batch), batch.targets)
    ]
    return max(0.0, float(torch.cat(rows).double().mean()))


def _bytes(size: tuple[int, ...], scheme: Scheme) -> int:
    *stack, rows, columns = size
    parts = scheme.sizes(rows, columns, stack).values()
    return sum(prod(dims) * getattr(torch, kind).itemsize for dims, kind in parts)
