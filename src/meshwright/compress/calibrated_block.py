"""Calibrated quantization of one block, the only one in memory, with the inputs that its text gives it.

Inputs are scaled where that helps. Then matrices are rounded in the order in which they are applied, each on the inputs
that it receives from the matrices already rounded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.compress.calibrated_methods import has_enough_rows, output_error, quantize_calibrated
from meshwright.compress.input_scales import Fold, awq_scales, fold, input_groups, list_folds, smooth_scales
from meshwright.compress.layer_inputs import Inputs, Wanted, observe_inputs
from meshwright.compress.stream import QuantizedLayer, layer_of
from meshwright.kernels.experts.experts import Counts
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import relative_error
from meshwright.model.attention import frequencies
from meshwright.model.transformer import Block, shrink, skeleton
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.spec.model.shape import ModelShape
from meshwright.training.step.batches import Batch


class _StopForward(Exception):
    """Ends a forward pass once the requested activations were observed."""


class BlockModel:
    """The model, the text, and the hidden states (B, S, D) of each batch at the input of the next block."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, batches: Iterable[Batch]) -> None:
        self.batches, self.dtype = list(batches), dtype
        self.device = self.batches[0].tokens.device
        self.model = skeleton(shape).eval()
        shrink(self.model, dtype)
        self.model.requires_grad_(False)
        if shape.positions == "rope":
            self.model.inverse = frequencies(shape).to(self.device)
        self.hidden: list[Tensor] = []

    @torch.no_grad()
    def enter(self, weights: Mapping[str, Tensor]) -> None:
        """Compute the inputs of the first block from the embedding, and learned positions, by name."""
        parts: list[nn.Module] = [self.model.embed]
        parts += [self.model.positions] if self.model.shape.positions == "learned" else []
        for part in parts:
            part.to_empty(device=self.device)
        parameters = self.model.state_dict()
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
        self.hidden = [self.model.enter(batch.tokens, _positions(batch)) for batch in self.batches]
        for part in parts:
            part.to("meta")

    @contextmanager
    def block(self, layer: int, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Block]:
        """Materialize one block with its weights inside `with`, and free its memory afterwards.

        Weights are consumed one at a time.
        """
        block = self.model.blocks[layer]
        block.to_empty(device=self.device)
        self.fill(layer, weights)
        try:
            yield block
        finally:
            block.to("meta")

    @torch.no_grad()
    def fill(self, layer: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights, by name, into a block that has memory."""
        prefix, parameters = f"layers.{layer}.", self.model.blocks[layer].state_dict()
        for name, tensor in weights:
            parameters[name.removeprefix(prefix)].copy_(tensor)
            del tensor

    @torch.no_grad()
    def listen(self, layer: int, name: str, observe: Callable[[Tensor, Counts | None], None]) -> None:
        """Run a block on each batch up to the matrix of this name, and call `observe` with its inputs."""

        def stop_at(_: str, x: Tensor, counts: Counts | None) -> None:
            observe(x, counts)
            raise _StopForward

        with observe_inputs(self.model, [name], stop_at):
            for number in range(len(self.batches)):
                try:
                    self._output(layer, number)
                except _StopForward:
                    continue

    @torch.no_grad()
    def step(self, layer: int) -> None:
        """Replace the hidden states by the outputs of a block."""
        for number in range(len(self.batches)):
            self.hidden[number] = self._output(layer, number)

    def _output(self, layer: int, number: int) -> Tensor:
        block, batch = self.model.blocks[layer], self.batches[number]
        positions = _positions(batch)
        attention_metadata = self.model.attention_metadata(positions, batch.tokens.shape[1], batch.documents)
        x: Tensor
        x, _ = block(self.hidden[number], attention_metadata[block.window])
        return x


def _positions(batch: Batch) -> Tensor:
    if batch.positions is not None:
        return batch.positions
    return torch.arange(batch.tokens.shape[1], device=batch.tokens.device).unsqueeze(0)


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
        # Scales change the weights and the inputs of later matrices, so they come before any rounding.
        for target in list_folds(text.model.shape, layer, schemes):
            _scale(text, layer, target, schemes, stored)
        live = text.model.state_dict()
        matrices: dict[str, QuantizedMatrix] = {}
        records: dict[str, QuantizedLayer] = {}
        # In the order of the forward pass: later matrices see the errors of those before them and absorb them.
        for group in input_groups(schemes):
            wanted: Wanted = "products" if any(schemes[name].weighs_errors for name in group) else "sample"
            inputs = _inputs(text, layer, group[0], live[group[0]], wanted)
            for name in group:
                matrices[name], records[name] = _round_matrix(name, live[name], schemes[name], inputs)
            for name in group:
                live[name].copy_(matrices[name].restored(live[name].dtype))
        plain = {name: live[name].to(tensor.dtype) for name, tensor in weights.items() if name not in matrices}
    parts: Parts = {name: matrices[name] if name in matrices else plain[name] for name in weights}
    return QuantizedBlock(parts, tuple(records[name] for name in schemes))


def _round_matrix(name: str, weight: Tensor, scheme: Scheme, inputs: Inputs) -> tuple[QuantizedMatrix, QuantizedLayer]:
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
        # An expert that few tokens chose has no statistics to rely on.
        if not seen.rows or not has_enough_rows(seen, number, first.shape[-1]):
            scales.append(torch.ones(first.shape[-1], device=first.device))
        elif inputs.wanted == "products":
            scales.append(awq_scales(matrices, seen.gram, seen.mean, kinds, target.tied))
        else:
            scales.append(smooth_scales(matrices, seen.peaks, seen.sampled_rows, kinds, target.tied))
    fold(text.model, target, scales, stored)
