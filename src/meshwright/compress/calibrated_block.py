"""Calibrated quantization of one block.

Inputs are scaled where that helps. Then matrices are rounded in the order in which they are applied, each on the inputs
that it receives from the matrices already rounded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from meshwright.compress.block_model import BlockModel
from meshwright.compress.calibrated_methods import enough, output_error, quantize_calibrated
from meshwright.compress.input_folds import Fold, fold, folds, input_groups
from meshwright.compress.input_scales import awq_scales, smooth_scales
from meshwright.compress.input_statistics import Inputs, Wanted
from meshwright.compress.stream import QuantizedLayer, layer_of
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import relative_error
from meshwright.spec.model.quantization_schemes import Scheme

Parts = dict[str, Tensor | QuantizedMatrix]
"""Parameters of a block by name, in the form in which they are stored."""


@dataclass(frozen=True, slots=True)
class QuantizedBlock:
    """A block after quantization."""

    parts: Parts
    layers: tuple[QuantizedLayer, ...]


@torch.no_grad()
def quantize_block(
    text: BlockModel, layer: int, weights: Mapping[str, Tensor], schemes: Mapping[str, Scheme], stored: torch.dtype
) -> QuantizedBlock:
    """Quantize the next block of the text.

    Args:
        weights: Parameters of the block by name, as stored.
        schemes: Schemes of its matrices by name.
        stored: Dtype of the parameters without a scheme.

    Raises:
        PlanError: Weights or activations are not finite.
    """
    with text.block(layer, weights.items()):
        # scales change the weights and the inputs of later matrices, so they come before any rounding
        for target in folds(text.model.shape, layer, schemes):
            _scale(text, layer, target, schemes, stored)
        live = text.model.state_dict()
        matrices: dict[str, QuantizedMatrix] = {}
        records: dict[str, QuantizedLayer] = {}
        # in the order of the forward pass: later matrices see the errors of those before them and absorb them
        for group in input_groups(schemes):
            wanted: Wanted = "products" if any(schemes[name].weighs_errors for name in group) else "sample"
            inputs = _inputs(text, layer, group[0], live[group[0]], wanted)
            for name in group:
                matrices[name], records[name] = _rounded(name, live[name], schemes[name], inputs)
            for name in group:
                live[name].copy_(matrices[name].restored(live[name].dtype))
        plain = {name: live[name].to(tensor.dtype) for name, tensor in weights.items() if name not in matrices}
    parts: Parts = {name: matrices[name] if name in matrices else plain[name] for name in weights}
    return QuantizedBlock(parts, tuple(records[name] for name in schemes))


def _rounded(
    name: str, weight: Tensor, scheme: Scheme, inputs: Inputs
) -> tuple[QuantizedMatrix, QuantizedLayer]:  # fmt: skip
    matrix, rare = quantize_calibrated(name, weight, scheme, inputs if scheme.weighs_errors else None)
    scaled = scheme.scales_inputs and weight.dim() == 2
    error = output_error(weight, matrix, inputs.statistics()) if scaled else None
    return matrix, layer_of(name, matrix, relative_error(weight, matrix), uncalibrated=rare, output_error=error)


def advance(text: BlockModel, layer: int, parts: Mapping[str, Tensor | QuantizedMatrix]) -> None:
    """Advance the text past a block, using its parts as they are stored."""
    with text.block(layer, restored_parts(parts, text.dtype)):
        text.step(layer)


def restored_parts(parts: Mapping[str, Tensor | QuantizedMatrix], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) with codes restored to numbers, one at a time."""
    for name, part in parts.items():
        yield name, part.restored(dtype) if isinstance(part, QuantizedMatrix) else part


def _inputs(text: BlockModel, layer: int, name: str, weight: Tensor, wanted: Wanted) -> Inputs:
    number = len(weight) if weight.dim() == 3 else 1
    return Inputs(name, wanted, number, weight.shape[-1], partial(text.listen, layer))


def _scale(text: BlockModel, layer: int, target: Fold, schemes: Mapping[str, Scheme], stored: torch.dtype) -> None:
    """Compute input scales for one target and fold them into the model, if its readers share a scaling method."""
    methods = {schemes[name].method for name in target.readers}
    live = text.model.state_dict()
    first = live[target.readers[0]]
    if methods in ({"awq"}, {"awq-gptq"}):
        inputs = _inputs(text, layer, target.readers[0], first, "products")
    elif methods == {"smooth"}:
        inputs = _inputs(text, layer, target.readers[0], first, "sample")
    else:
        return
    number = len(first) if first.dim() == 3 else 1
    scales = []
    for index in range(number):
        seen = inputs.statistics(index)
        matrices = [live[name].view(number, *live[name].shape[-2:])[index].float() for name in target.readers]
        kinds = [schemes[name] for name in target.readers]
        # an expert that few tokens chose has no statistics to rely on
        if not seen.rows or not enough(seen, number, first.shape[-1]):
            scales.append(torch.ones(first.shape[-1], device=first.device))
        elif inputs.wanted == "products":
            scales.append(awq_scales(matrices, seen.gram, seen.mean, kinds, target.tied))
        else:
            scales.append(smooth_scales(matrices, seen.peaks, seen.sampled_rows, kinds, target.tied))
    fold(text.model, target, scales, stored)
