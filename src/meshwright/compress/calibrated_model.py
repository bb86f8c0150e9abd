"""Calibrated quantization of a model: block after block, with one block and its inputs in memory.

Finished blocks are stored in a folder beside the output (finished_blocks.py). After a kill, the next run loads them,
applies them to the text and continues with the first missing block. Its output is identical to the bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.compress.calibrated_block import BlockModel, advance, quantize_block
from meshwright.compress.finished_blocks import Fingerprint, FinishedBlocks
from meshwright.compress.original import OriginalModel
from meshwright.compress.stream import QuantizedLayer
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.formats.quantized.interface import QuantizedModel, Weights
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import DataError, MeshwrightError, argument
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.training.step.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A model whose blocks are all quantized."""

    weights: Weights
    """The model's parameters, read lazily."""
    layers: tuple[QuantizedLayer, ...]
    resumed: int
    """Number of blocks taken from an earlier run."""
    finished: FinishedBlocks
    """Temporary files, to be removed once the weights are written."""


def check_text(model: QuantizedModel, batches: Sequence[Batch]) -> None:
    """Raise DataError when the text has fewer tokens than a matrix has inputs, which would overfit the text."""
    sizes = quantizable(model.shape)
    widest = max(model.schemes, key=lambda name: sizes[name][-1])
    tokens, inputs = sum(batch.valid for batch in batches), sizes[widest][-1]
    if tokens < inputs:
        raise DataError(
            f"the calibration text is too short: it has {tokens} tokens, and {widest} has {inputs} inputs. "
            f"Raise {argument('calibration')}, give {argument('data')} {inputs} tokens beside those that are "
            "scored, or take a scheme without text: int4-hqq"
        )


def calibrate(
    out: Path,
    original: OriginalModel,
    model: QuantizedModel,
    batches: Sequence[Batch],
    dtype: torch.dtype,
    done: Callable[[int, int], None] = lambda block, blocks: None,
) -> Calibrated:
    """Quantize every block.

    Args:
        out: Output folder, beside which finished blocks are stored.
        dtype: Dtype of the activations.
        done: Called with (block, blocks) after each block.

    Raises:
        PlanError: Weights or activations are not finite.
        DataError: The text is too short.
    """
    check_text(model, batches)
    finished = FinishedBlocks(out)
    try:
        layers, resumed = _blocks(finished, original, model, batches, dtype, done)
    # a refusal would come again, so what is finished is of no use; a killed run leaves its blocks to resume from
    except MeshwrightError:
        finished.remove()
        raise
    weights = _weights(finished, original, model)
    return Calibrated(weights=weights, layers=layers, resumed=resumed, finished=finished)


def _blocks(
    finished: FinishedBlocks, original: OriginalModel, model: QuantizedModel, batches: Sequence[Batch],
    dtype: torch.dtype, done: Callable[[int, int], None],
) -> tuple[tuple[QuantizedLayer, ...], int]:  # fmt: skip
    shape, sizes = model.shape, quantizable(model.shape)
    text = BlockModel(shape, dtype, drop_padding_rows(batches))
    entry_names = ["embed.weight"] + ["positions.weight"] * (shape.positions == "learned")
    entry_weights = _read_named(original, model, entry_names)
    # a stored block is used only if all it depends on is equal: the text, and all weights up to it
    fingerprint = Fingerprint((shape, str(dtype), str(model.dtype), torch.__version__))
    for batch in text.batches:
        read = {"tokens": batch.tokens, "positions": batch.positions, "documents": batch.documents}
        fingerprint.add({name: tensor for name, tensor in read.items() if tensor is not None})
    fingerprint.add(entry_weights)
    text.enter(entry_weights)
    layers: list[QuantizedLayer] = []
    resumed = 0
    for number, weights in _group_by_layer(original.weights(model.dtype), model):
        schemes = {name: model.schemes[name] for name in weights if name in model.schemes}
        key = fingerprint.add(weights, [(name, astuple(scheme)) for name, scheme in schemes.items()])
        block = finished.find(number, key, schemes, sizes)
        resumed += block is not None
        if block is None:
            block = quantize_block(text, number, weights, schemes, model.dtype)
            finished.save(number, key, block)
        # the next block is calibrated on outputs of the quantized one, as it will run
        advance(text, number, block.parts)
        layers += block.layers
        done(number + 1, shape.layers)
    return tuple(layers), resumed


def drop_padding_rows(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Yield the batches without padding rows, whose tokens all have weight 0."""
    for batch in batches:
        keep = torch.tensor([count > 0 for count in batch.valid_of_rows], device=batch.tokens.device)
        if len(keep) != len(batch.tokens) or bool(keep.all()):
            yield batch
        elif bool(keep.any()):
            documents, positions = (
                rows if rows is None or len(rows) != len(keep) else rows[keep]
                for rows in (batch.documents, batch.positions)
            )
            yield Batch(
                tokens=batch.tokens[keep], targets=batch.targets[keep], valid=batch.valid, documents=documents,
                positions=positions,
            )  # fmt: skip


def _read_named(original: OriginalModel, model: QuantizedModel, names: list[str]) -> dict[str, Tensor]:
    """Read the named parameters, and stop after the last of them."""
    parameters: dict[str, Tensor] = {}
    for name, tensor in original.weights(model.dtype):
        if name in names:
            parameters[name] = tensor
        if len(parameters) == len(names):
            break
    return parameters


def _group_by_layer(
    weights: Iterator[tuple[str, Tensor]], model: QuantizedModel
) -> Iterator[tuple[int, dict[str, Tensor]]]:  # fmt: skip
    """Yield (layer, parameters by name), layer after layer, in the order of the shape."""
    names = list(tensor_sizes(model.shape))
    layer_names: dict[int, list[str]] = {}
    for name in names:
        if (layer := layer_number(name)) is not None:
            layer_names.setdefault(layer, []).append(name)
    # files may hold tensors in another order than layers: at most what is out of order waits
    waiting: dict[str, Tensor] = {}
    number = 0
    for name, tensor in weights:
        if layer_number(name) is None:
            continue
        waiting[name] = tensor
        while number in layer_names and all(other in waiting for other in layer_names[number]):
            yield number, {other: waiting.pop(other) for other in layer_names[number]}
            number += 1


def layer_number(name: str) -> int | None:
    """Return the layer of a parameter, or None outside the layers."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else None


def _weights(finished: FinishedBlocks, original: OriginalModel, model: QuantizedModel) -> Weights:
    """Yield the parameters outside of blocks unchanged, then those of the finished blocks."""
    sizes = quantizable(model.shape)
    schemes: Mapping[str, Scheme] = model.schemes
    for name, tensor in original.weights(model.dtype):
        if layer_number(name) is None:
            yield name, tensor
    for number in range(model.shape.layers):
        yield from finished.parts(number, schemes, sizes).items()
