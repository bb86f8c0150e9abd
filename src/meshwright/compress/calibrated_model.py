"""Calibrated quantization of a model: block after block, with one block and its inputs in memory.

Finished blocks are stored in a folder next to the output. After a kill, the next run loads them, applies them to the
text and continues with the first missing block. Its output is identical to the bit.

    .OUT.blocks/00003/model.safetensors    parameters of block 3; matrices as NAME.codes and NAME.scales
    .OUT.blocks/00003/block.json           a key, the sha256 of the file, and the report of each matrix

The key hashes the inputs of the block: schemes, text and weights, of this block and of all before it. A block with
another key or a damaged file is recomputed. A block's folder appears complete or not at all.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.compress.calibrated_block import BlockModel, Parts, QuantizedBlock, advance, quantize_block
from meshwright.compress.original import OriginalModel
from meshwright.compress.stream import QuantizedLayer
from meshwright.formats.hub.config import read_json
from meshwright.formats.hub.directory import fresh_folder
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.formats.quantized.interface import QuantizedModel, Weights
from meshwright.formats.safetensors import SINGLE, Planned, ShardWriter, pieces, stored_tensors
from meshwright.kernels.quantized.matrix import PARTS, QuantizedMatrix
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import DataError, HubError, MeshwrightError, argument
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.spec.units import GB
from meshwright.store.checkpoint_folder import record_file
from meshwright.training.step.batches import Batch

RECORD = "block.json"
VERSION = 1
"""Version of methods and files. Blocks of another version are recomputed."""
WHOLE_BYTES = 1000 * GB
"""Shard size above that of any block, so that a block is one file."""


class Fingerprint:
    """Running hash over the inputs of all blocks so far."""

    def __init__(self, about: object) -> None:
        self._hash = hashlib.sha256(repr((VERSION, about)).encode())

    def add(self, tensors: Mapping[str, Tensor], about: object = None) -> str:
        """Add tensors and metadata, and return the key so far."""
        self._hash.update(repr(about).encode())
        for name, tensor in tensors.items():
            self._hash.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            for piece in pieces(tensor):
                self._hash.update(piece)
        return self._hash.hexdigest()


class FinishedBlocks:
    """The finished blocks of one output folder."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f".{out.name}.blocks")

    def save(self, number: int, key: str, block: QuantizedBlock) -> None:
        """Store a block durably. Raises OSError."""
        folder = self._folder(number)
        # A block of another key may be there, and `fresh_folder` takes no folder that is not empty.
        shutil.rmtree(folder, ignore_errors=True)
        # Left behind by a killed process.
        for rest in self.path.glob(f".{folder.name}.partial-*"):
            shutil.rmtree(rest, ignore_errors=True)
        tensors = dict(_flat(block.parts))
        planned = [Planned(name=name, size=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()]
        with fresh_folder(folder) as partial:
            with ShardWriter(partial, planned, WHOLE_BYTES) as writer:
                for name, tensor in tensors.items():
                    writer.write(name, tensor)
            layers = [asdict(report) for report in block.layers]
            # The key says what the block was made from, the hash that its file is whole.
            record = {"key": key, "sha256": record_file(partial / SINGLE).sha256, "layers": layers}
            (partial / RECORD).write_text(json.dumps(record), encoding="utf-8")

    def find(
        self, number: int, key: str, schemes: Mapping[str, Scheme], sizes: Mapping[str, Any]
    ) -> QuantizedBlock | None:
        """Load a block with this key, whose matrices have these schemes and sizes. None = it must be computed."""
        folder = self._folder(number)
        try:
            record = read_json(folder / RECORD) or {}
            if record.get("key") != key or record.get("sha256") != record_file(folder / SINGLE).sha256:
                return None
            layers = tuple(QuantizedLayer(**report) for report in record["layers"])
            return QuantizedBlock(self.parts(number, schemes, sizes), layers)
        except (HubError, OSError, TypeError, KeyError):
            return None

    def parts(self, number: int, schemes: Mapping[str, Scheme], sizes: Mapping[str, Any]) -> Parts:
        """Read the parameters of a stored block, by name."""
        stored, parameters = stored_tensors(self._folder(number)), Parts()
        for full in stored:
            name, _, leaf = full.rpartition(".")
            if name not in schemes or leaf not in PARTS:
                parameters[full] = stored[full].read()
            elif name not in parameters:
                parts: dict[str, Any] = {
                    attribute: stored[f"{name}.{part}"].read()
                    for part, attribute in PARTS.items()
                    if f"{name}.{part}" in stored
                }
                parameters[name] = QuantizedMatrix(scheme=schemes[name], size_in=sizes[name][-1], **parts)
        return parameters

    @property
    def bytes(self) -> int:
        """Size of the stored parameter files."""
        return sum(file.stat().st_size for file in self.path.glob(f"[0-9]*/{SINGLE}"))

    def remove(self) -> None:
        """Delete all stored blocks."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _folder(self, number: int) -> Path:
        return self.path / f"{number:05d}"


def _flat(parts: Mapping[str, Tensor | QuantizedMatrix]) -> list[tuple[str, Tensor]]:
    tensors: list[tuple[str, Tensor]] = []
    for name, parameter in parts.items():
        if isinstance(parameter, QuantizedMatrix):
            tensors += [(f"{name}.{part}", tensor.cpu()) for part, tensor in parameter.tensors.items()]
        else:
            tensors.append((name, parameter.cpu()))
    return tensors


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
            f"Raise {argument('calibration')}, give {argument('data')} {inputs} tokens in addition to those that are "
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
        out: Output folder. Finished blocks are stored next to it.
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
    # A refusal would come again, so what is finished is of no use. A killed run leaves its blocks to resume from.
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
    # A stored block is used only if all it depends on is equal: the text, and all weights up to it.
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
        # The next block is calibrated on outputs of the quantized one, as it will run.
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
    # Files may hold tensors in another order than layers: at most what is out of order waits.
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
