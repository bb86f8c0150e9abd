"""Weights of a Hugging Face directory in and out, streaming: one tensor in memory, never the model twice."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwright.model.hub.safetensors_files import Planned, ShardWriter, Stored, stored_tensors
from meshwright.model.hub.weight_names import IGNORED, PREFIX, Binding, bindings
from meshwright.spec.errors import HubError
from meshwright.spec.inventory import num_parameters
from meshwright.spec.shape import ModelShape
from meshwright.spec.units import GB

HEAD = "lm_head.weight"
_SCALE = "_scale_inv"


def load_weights(
    folder: Path,
    shape: ModelShape,
    put: Callable[[str, Tensor], None],
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Call put(name, tensor) with what `stored_weights` finds."""
    for name, tensor in stored_weights(folder, shape, wanted):
        put(name, tensor)


def stored_weights(
    folder: Path, shape: ModelShape, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and router correction bias of the shape, by our names, layer after layer.

    Of what is stored together and not `wanted` at all nothing is read: a pipeline stage reads its own layers.
    Tensors come in the dtype of the file (fp8 by blocks as fp32). Everything is checked before the first one.
    HubError: missing shard, truncated file, missing, unexpected or misshapen tensor, an untied head where the config
    ties it.
    """
    bound, stored, scales = check_weights(folder, shape)
    block = _block(folder) if scales else (0, 0)

    def read(name: str) -> Tensor:
        tensor, scale = stored[name].read(), scales.get(name + _SCALE)
        if scale is None and tensor.dtype.itemsize == 1:
            raise HubError(f"{folder}: {name} is fp8 without {name}{_SCALE}: its scale is not known")
        return tensor if scale is None else dequantize(tensor, scale.read(), block, name)

    if shape.tied and HEAD in stored:
        check_tied(folder, bound, read)
    for binding in bound:
        if not any(map(wanted, binding.ours)):
            continue
        rows = [size[0] for size in binding.ours.values()]
        tensors = binding.transform.restore([read(name) for name in binding.theirs], rows, shape)
        yield from zip(binding.ours, tensors, strict=True)


def check_weights(
    folder: Path, shape: ModelShape
) -> tuple[list[Binding], dict[str, Stored], dict[str, Stored]]:  # fmt: skip
    """What a directory holds, by the headers of its files: tensors that the shape has, each in its size, and scales of
    fp8 ones. HubError as stored_weights. For who makes room for a model, before he does."""
    every = stored_tensors(folder)
    check_numbers(folder, shape, sum(math.prod(one.size) for one in every.values()))
    bound = bindings(shape)
    stored = _named_as_ours(every, shape)
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith(_SCALE)}
    _check(folder, shape, bound, stored)
    return bound, stored, scales


def check_numbers(folder: Path, shape: ModelShape, held: int) -> None:
    """HubError where a config describes many times as much as files hold: nothing of that size is then made, not even
    a list of names."""
    described = num_parameters(shape.base)
    if described > TOO_MANY * held:
        raise HubError(
            f"{folder} does not match its weights: config.json describes {described:,} numbers, and the files "
            f"hold {held:,}. Copy or download them again"
        )


TOO_MANY = 8
"""Times what is there: less is said by names of tensors that are missing."""


def save_weights(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = 5 * GB,
) -> None:
    """Write model.safetensors, or shards of at most max_shard_bytes and their index, into an existing folder.

    `tensors` are ours by name, in any order; each is cast to `dtype` (router correction biases stay fp32). A tied head
    is left out. HubError: a tensor that is unknown, misshapen or missing.
    """
    bound = bindings(shape)
    planned = [
        Planned(name=name, size=size, dtype=torch.float32 if name.endswith("correction_bias") else dtype)
        for binding in bound
        for name, size in binding.theirs.items()
    ]
    binding_of = {name: binding for binding in bound for name in binding.ours}
    pending: dict[str, Tensor] = {}
    with ShardWriter(folder, planned, max_shard_bytes) as writer:
        for name, tensor in tensors:
            if shape.tied and name == "head.weight":
                continue
            _check_ours(name, tensor, binding_of)
            pending[name] = tensor
            if all(other in pending for other in binding_of[name].ours):
                _write_bound(writer, binding_of[name], pending, shape)


def _write_bound(writer: ShardWriter, binding: Binding, pending: dict[str, Tensor], shape: ModelShape) -> None:
    theirs = binding.transform.export([pending.pop(name) for name in binding.ours], shape)
    for name, tensor in zip(binding.theirs, theirs, strict=True):
        writer.write(name, tensor)


def _check_ours(name: str, tensor: Tensor, binding_of: dict[str, Binding]) -> None:
    if name not in binding_of:
        raise HubError(f"{name} is no parameter of this shape")
    size = binding_of[name].ours[name]
    if tuple(tensor.shape) != size:
        raise HubError(f"{name} is {list(tensor.shape)} where this shape has {list(size)}")


def _named_as_ours(stored: dict[str, Stored], shape: ModelShape) -> dict[str, Stored]:
    """Names with the prefix of the body, without tables and without layers for multi-token prediction."""
    prefix = PREFIX.get(shape.family, "model.")
    if not any(name.startswith(prefix) for name in stored):
        stored = {name if name == HEAD else prefix + name: tensor for name, tensor in stored.items()}
    extra = [name.removesuffix("eh_proj.weight") for name in stored if name.endswith(".eh_proj.weight")]
    beyond = tuple(start for start in extra if _layer(start) >= shape.layers)
    return {
        name: tensor
        for name, tensor in stored.items()
        if not IGNORED.fullmatch(name) and not (beyond and name.startswith(beyond))
    }


def _layer(name: str) -> int:
    match = re.search(r"\.(\d+)\.", name)
    return int(match.group(1)) if match else -1


def _check(folder: Path, shape: ModelShape, bound: list[Binding], stored: dict[str, Stored]) -> None:
    expected = {name: size for binding in bound for name, size in binding.theirs.items()}
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected and not (shape.tied and name == HEAD)]
    kind = f"a {shape.family} of {shape.layers} layers"
    if missing:
        raise HubError(f"{folder} lacks {len(missing)} tensors of {kind}, first {missing[0]}")
    if unexpected:
        raise HubError(f"{folder} holds {len(unexpected)} tensors that {kind} does not have, first {unexpected[0]}")
    for name, size in expected.items():
        if stored[name].size != size:
            raise HubError(f"{folder}: {name} is {list(stored[name].size)} where config.json says {list(size)}")
        if not stored[name].dtype.is_floating_point:
            raise HubError(f"{folder}: {name} holds {stored[name].dtype}, and weights must be floating-point numbers")


def check_tied(folder: Path, bound: list[Binding], read: Callable[[str], Tensor]) -> None:
    """HubError where the head that a folder holds is not the embedding that its config ties it to."""
    embedding = next(name for binding in bound if "embed.weight" in binding.ours for name in binding.theirs)
    if not torch.equal(read(HEAD), read(embedding)):
        raise HubError(f"{folder}: {HEAD} differs from {embedding}, but config.json has tie_word_embeddings=true")


def _block(folder: Path) -> tuple[int, int]:
    """Rows and columns that share one scale."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rows, columns = config["quantization_config"]["weight_block_size"]
        if not (type(rows) is type(columns) is int and min(rows, columns) > 0):
            raise ValueError(f"{rows} x {columns}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise HubError(
            f"{folder}/config.json lacks quantization_config.weight_block_size for its fp8 weights, two whole numbers"
        ) from error
    return rows, columns


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int], name: str) -> Tensor:
    """fp8 weight (out, in) times the scale of its block (out / rows, in / columns, rounded up), in fp32. HubError for
    scales that do not fit, and for products that are no numbers: short sequences would hide them."""
    rows, columns = block
    if weight.dim() != 2 or tuple(scale.shape) != (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)):
        raise HubError(
            f"{name}: scales {list(scale.shape)} do not fit weights {list(weight.shape)} in blocks of {block}"
        )
    rows, columns = map(min, block, weight.shape)  # a block may be larger than the matrix, by any number
    spread = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    numbers = weight.float().mul_(spread[: weight.shape[0], : weight.shape[1]])
    if not bool(numbers.isfinite().all()):
        raise HubError(f"{name} or its scales are infinite or NaN: damaged; copy or download it again")
    return numbers
