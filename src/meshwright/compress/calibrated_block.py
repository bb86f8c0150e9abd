"""One block: inputs are scaled where that helps, then matrices are rounded in the order in which they are applied, each
by what it reads behind those that are rounded already."""

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
from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.kernels.weight_codes import relative_error
from meshwright.spec.quantization_schemes import Scheme

Parts = dict[str, Tensor | QuantizedMatrix]
"""Parameters of a block by name, as they are written."""


@dataclass(frozen=True, slots=True)
class QuantizedBlock:
    """What became of one."""

    parts: Parts
    layers: tuple[QuantizedLayer, ...]


@torch.no_grad()
def quantize_block(
    text: BlockModel, layer: int, weights: Mapping[str, Tensor], schemes: Mapping[str, Scheme], stored: torch.dtype
) -> QuantizedBlock:
    """`weights` of a block by name, as they are stored; `schemes` of its matrices; `stored`: dtype of what has none.
    The block is the text's next one. PlanError for weights or activations that are not finite."""
    with text.block(layer, weights.items()):
        for place in folds(text.model.shape, layer, schemes):
            _scale(text, layer, place, schemes, stored)
        live = text.model.state_dict()
        made: dict[str, QuantizedMatrix] = {}
        records: dict[str, QuantizedLayer] = {}
        for group in input_groups(schemes):
            wanted: Wanted = "products" if any(schemes[name].weighs_errors for name in group) else "sample"
            inputs = _inputs(text, layer, group[0], live[group[0]], wanted)
            for name in group:
                made[name], records[name] = _rounded(name, live[name], schemes[name], inputs)
            for name in group:
                live[name].copy_(made[name].restored(live[name].dtype))
        kept = {name: live[name].to(tensor.dtype) for name, tensor in weights.items() if name not in made}
    parts: Parts = {name: made[name] if name in made else kept[name] for name in weights}
    return QuantizedBlock(parts, tuple(records[name] for name in schemes))


def _rounded(
    name: str, weight: Tensor, scheme: Scheme, inputs: Inputs
) -> tuple[QuantizedMatrix, QuantizedLayer]:  # fmt: skip
    matrix, rare = quantize_calibrated(name, weight, scheme, inputs if scheme.weighs_errors else None)
    scaled = scheme.scales_inputs and weight.dim() == 2
    error = output_error(weight, matrix, inputs.of()) if scaled else None
    return matrix, layer_of(name, matrix, relative_error(weight, matrix), uncalibrated=rare, output_error=error)


def advance(text: BlockModel, layer: int, parts: Mapping[str, Tensor | QuantizedMatrix]) -> None:
    """From what a block reads to what the next one does, with its parts as they are written."""
    with text.block(layer, restored_parts(parts, text.dtype)):
        text.step(layer)


def restored_parts(parts: Mapping[str, Tensor | QuantizedMatrix], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Parameters as numbers, one after the other: none is restored beside the next."""
    for name, one in parts.items():
        yield name, one.restored(dtype) if isinstance(one, QuantizedMatrix) else one


def _inputs(text: BlockModel, layer: int, name: str, weight: Tensor, wanted: Wanted) -> Inputs:
    number = len(weight) if weight.dim() == 3 else 1
    return Inputs(name, wanted, number, weight.shape[-1], partial(text.listen, layer))


def _scale(text: BlockModel, layer: int, place: Fold, schemes: Mapping[str, Scheme], stored: torch.dtype) -> None:
    """Find and fold scales at one place, where all its readers are of one method that has some."""
    methods = {schemes[name].method for name in place.readers}
    live = text.model.state_dict()
    first = live[place.readers[0]]
    if methods in ({"awq"}, {"awq-gptq"}):
        inputs = _inputs(text, layer, place.readers[0], first, "products")
    elif methods == {"smooth"}:
        inputs = _inputs(text, layer, place.readers[0], first, "sample")
    else:
        return
    number = len(first) if first.dim() == 3 else 1
    found = []
    for one in range(number):
        seen = inputs.of(one)
        matrices = [live[name].view(number, *live[name].shape[-2:])[one].float() for name in place.readers]
        kinds = [schemes[name] for name in place.readers]
        if not seen.rows or not enough(seen, number, first.shape[-1]):
            found.append(torch.ones(first.shape[-1], device=first.device))
        elif inputs.wanted == "products":
            found.append(awq_scales(matrices, seen.gram, seen.mean, kinds, place.tied))
        else:
            found.append(smooth_scales(matrices, seen.peaks, seen.some_rows, kinds, place.tied))
    fold(text.model, place, found, stored)
