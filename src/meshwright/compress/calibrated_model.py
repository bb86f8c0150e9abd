"""A model's matrices by a method that needs text: block after block, with one block and what it reads in memory.

Blocks that are done stay in a folder beside the one that is made (finished_blocks.py). A run that was killed finds them
there, applies them to the text and goes on with the next: it ends with the same bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.compress.block_model import BlockModel
from meshwright.compress.calibrated_block import advance, quantize_block
from meshwright.compress.finished_blocks import Fingerprint, FinishedBlocks
from meshwright.compress.original import OriginalModel
from meshwright.compress.stream import QuantizedLayer
from meshwright.model.hub.weight_names import tensor_sizes
from meshwright.model.quantized_formats.folder_format import QuantizedModel, Weights
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import DataError, MeshwrightError
from meshwright.spec.quantization_schemes import Scheme
from meshwright.training.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """All blocks are done."""

    weights: Weights
    """The model's parameters, read as they are asked for."""
    layers: tuple[QuantizedLayer, ...]
    resumed: int
    """Blocks that an earlier run had made."""
    finished: FinishedBlocks
    """To be removed once the weights are where they belong."""


def check_text(model: QuantizedModel, batches: Sequence[Batch]) -> None:
    """DataError where the text has fewer tokens than a matrix has inputs: rounding would fit the text alone."""
    sizes = quantizable(model.shape)
    widest = max(model.schemes, key=lambda name: sizes[name][-1])
    tokens, inputs = sum(batch.valid for batch in batches), sizes[widest][-1]
    if tokens < inputs:
        raise DataError(
            f"the text has {tokens} tokens to calibrate on, and {widest} has {inputs} inputs: raise calibration=, "
            f"give data= at least {inputs} tokens beside those that are scored, or take a scheme without text: int4-hqq"
        )


def calibrate(
    out: Path,
    original: OriginalModel,
    model: QuantizedModel,
    batches: Sequence[Batch],
    dtype: torch.dtype,
    done: Callable[[int, int], None] = lambda block, blocks: None,
) -> Calibrated:
    """Quantize every block, with activations in `dtype`; `done` hears of each. `out`: the folder that will be made.
    PlanError for weights or activations that are not finite; DataError for too little text."""
    check_text(model, batches)
    finished = FinishedBlocks(out)
    try:
        layers, resumed = _blocks(finished, original, model, batches, dtype, done)
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
    text = BlockModel(shape, dtype, whole_rows(batches))
    begin = _named(original, model, ["embed.weight"] + ["positions.weight"] * (shape.positions == "learned"))
    print_of = Fingerprint((shape, str(dtype), str(model.dtype), torch.__version__))
    for batch in text.batches:
        read = {"tokens": batch.tokens, "positions": batch.positions, "documents": batch.documents}
        print_of.add({name: one for name, one in read.items() if one is not None})
    print_of.add(begin)
    text.enter(begin)
    layers: list[QuantizedLayer] = []
    resumed = 0
    for number, weights in _by_layer(original.weights(model.dtype), model):
        own = {name: model.schemes[name] for name in weights if name in model.schemes}
        key = print_of.add(weights, [(name, astuple(scheme)) for name, scheme in own.items()])
        block = finished.find(number, key, own, sizes)
        resumed += block is not None
        if block is None:
            block = quantize_block(text, number, weights, own, model.dtype)
            finished.save(number, key, block)
        advance(text, number, block.parts)
        layers += block.layers
        done(number + 1, shape.layers)
    return tuple(layers), resumed


def whole_rows(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Without rows that fill a batch up and do not count."""
    for batch in batches:
        keep = torch.tensor([count > 0 for count in batch.valid_of_rows], device=batch.tokens.device)
        if len(keep) != len(batch.tokens) or bool(keep.all()):
            yield batch
        elif bool(keep.any()):
            documents, positions = (
                one if one is None or len(one) != len(keep) else one[keep] for one in (batch.documents, batch.positions)
            )
            yield Batch(
                tokens=batch.tokens[keep], targets=batch.targets[keep], valid=batch.valid, documents=documents,
                positions=positions,
            )  # fmt: skip


def _named(original: OriginalModel, model: QuantizedModel, names: list[str]) -> dict[str, Tensor]:
    """Some parameters; reading ends with the last."""
    found: dict[str, Tensor] = {}
    for name, tensor in original.weights(model.dtype):
        if name in names:
            found[name] = tensor
        if len(found) == len(names):
            break
    return found


def _by_layer(
    weights: Iterator[tuple[str, Tensor]], model: QuantizedModel
) -> Iterator[tuple[int, dict[str, Tensor]]]:  # fmt: skip
    """The parameters of one layer after the other, each by name, in the order of the shape."""
    names = list(tensor_sizes(model.shape))
    of: dict[int, list[str]] = {}
    for name in names:
        if (layer := layer_number(name)) is not None:
            of.setdefault(layer, []).append(name)
    waiting: dict[str, Tensor] = {}
    number = 0
    for name, tensor in weights:
        if layer_number(name) is None:
            continue
        waiting[name] = tensor
        while number in of and all(one in waiting for one in of[number]):
            yield number, {one: waiting.pop(one) for one in of[number]}
            number += 1


def layer_number(name: str) -> int | None:
    """Of a parameter; None outside the layers."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else None


def _weights(finished: FinishedBlocks, original: OriginalModel, model: QuantizedModel) -> Weights:
    """Of the blocks that are done, and what is outside of blocks as it was."""
    sizes = quantizable(model.shape)
    schemes: Mapping[str, Scheme] = model.schemes
    for name, tensor in original.weights(model.dtype):
        if layer_number(name) is None:
            yield name, tensor
    for number in range(model.shape.layers):
        yield from finished.parts(number, schemes, sizes).items()
