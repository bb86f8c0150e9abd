"""Weights of a Hugging Face directory, read and written one tensor at a time: the model is never in memory twice."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from meshwright.formats.hub.weight_names import IGNORED, PREFIX, Binding, bindings
from meshwright.formats.safetensors.files import Planned, ShardWriter, Stored, stored_tensors
from meshwright.spec.errors import HubError
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.units import GB
from meshwright.spec.weights.inventory import num_parameters

HEAD = "lm_head.weight"
_SCALE = "_scale_inv"


def load_weights(
    folder: Path,
    shape: ModelShape,
    put: Callable[[str, Tensor], None],
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Call put(name, tensor) with each tensor of `stored_weights`."""
    for name, tensor in stored_weights(folder, shape, wanted):
        put(name, tensor)


def stored_weights(
    folder: Path, shape: ModelShape, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and router correction bias of the shape, by our names, layer after layer.

    Tensors that are stored together are skipped when none of them is `wanted`, so a pipeline stage reads only its
    layers. Tensors have the dtype of the file (fp8 by blocks becomes fp32). Everything is checked before the first one.

    Raises HubError for a missing shard, a truncated file, a missing, unexpected or misshapen tensor, or an untied head
    where the config ties it.
    """
    bound, stored, scales = check_weights(folder, shape)
    block_size = _block_size(folder) if scales else (0, 0)

    def read(name: str) -> Tensor:
        tensor, scale = stored[name].read(), scales.get(name + _SCALE)
        if scale is None and tensor.dtype.itemsize == 1:
            raise HubError(f"{folder}: {name} is fp8 without {name}{_SCALE}: its scale is not known")
        return tensor if scale is None else dequantize(tensor, scale.read(), block_size, name)

    # Some writers store a tied head again. It must then equal the embedding, or the config is wrong.
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
    """Check a directory by the headers of its files, before memory for a model is allocated.

    Returns the bindings, the stored tensors, and the scales of fp8 ones. Raises HubError as `stored_weights` does.
    """
    every = stored_tensors(folder)
    check_numbers(folder, shape, sum(math.prod(tensor.size) for tensor in every.values()))
    bound = bindings(shape)
    stored = _with_prefix(every, shape)
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith(_SCALE)}
    _check_tensors(folder, shape, bound, stored)
    return bound, stored, scales


def check_numbers(folder: Path, shape: ModelShape, held: int) -> None:
    """Raise HubError if a config describes far more numbers than files hold, before even names are listed."""
    described = num_parameters(shape.base)
    if described > TOO_MANY * held:
        raise HubError(
            f"{folder} does not match its weights: config.json describes {described:,} numbers, and the files "
            f"hold {held:,}. Copy or download them again"
        )


TOO_MANY = 8
"""Ratio of described to stored numbers that is refused. Smaller gaps are reported by names of missing tensors."""


def save_weights(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = 5 * GB,
) -> None:
    """Write model.safetensors, or shards of at most max_shard_bytes and their index, into an existing folder.

    `tensors` have our names, in any order. Each is cast to `dtype`, except router correction biases, which stay fp32. A
    tied head is left out. Raises HubError for an unknown, misshapen or missing tensor.
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
            if name not in binding_of:
                raise HubError(f"{name} is no parameter of this shape")
            binding = binding_of[name]
            if tuple(tensor.shape) != binding.ours[name]:
                raise HubError(f"{name} is {list(tensor.shape)} where this shape has {list(binding.ours[name])}")
            # Tensors that are stored fused wait until the last of them has come.
            pending[name] = tensor
            if all(other in pending for other in binding.ours):
                theirs = binding.transform.export([pending.pop(ours) for ours in binding.ours], shape)
                for their, stored in zip(binding.theirs, theirs, strict=True):
                    writer.write(their, stored)


def _with_prefix(stored: dict[str, Stored], shape: ModelShape) -> dict[str, Stored]:
    """Add the prefix of the body to the names. Drop known tables and layers for multi-token prediction."""
    prefix = PREFIX.get(shape.family, "model.")
    # A base model without a head is stored without the prefix of its body.
    if not any(name.startswith(prefix) for name in stored):
        stored = {name if name == HEAD else prefix + name: tensor for name, tensor in stored.items()}
    extra = [name.removesuffix("eh_proj.weight") for name in stored if name.endswith(".eh_proj.weight")]
    numbers = {start: re.search(r"\.(\d+)\.", start) for start in extra}
    beyond = tuple(start for start, match in numbers.items() if match and int(match[1]) >= shape.layers)
    return {
        name: tensor
        for name, tensor in stored.items()
        if not IGNORED.fullmatch(name) and not (beyond and name.startswith(beyond))
    }


def _check_tensors(folder: Path, shape: ModelShape, bound: list[Binding], stored: dict[str, Stored]) -> None:
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
    """Raise HubError if the head in a folder differs from the embedding to which the config ties it."""
    embedding = next(name for binding in bound if "embed.weight" in binding.ours for name in binding.theirs)
    if not torch.equal(read(HEAD), read(embedding)):
        raise HubError(f"{folder}: {HEAD} differs from {embedding}, but config.json has tie_word_embeddings=true")


def _block_size(folder: Path) -> tuple[int, int]:
    """Return the rows and columns that share one scale."""
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


def dequantize(weight: Tensor, scale: Tensor, block_size: tuple[int, int], name: str) -> Tensor:
    """Return the fp8 weight (out, in) times the scale of its block, in fp32.

    Scales are (out / rows, in / columns), rounded up. Raises HubError when they do not fit, or when products are not
    finite: short sequences would hide that.
    """
    rows, columns = block_size
    if weight.dim() != 2 or tuple(scale.shape) != (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)):
        raise HubError(
            f"{name}: scales {list(scale.shape)} do not fit weights {list(weight.shape)} in blocks of {block_size}"
        )
    rows, columns = map(min, block_size, weight.shape)  # a block may be far larger than the matrix
    spread = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    numbers = weight.float().mul_(spread[: weight.shape[0], : weight.shape[1]])
    if not bool(numbers.isfinite().all()):
        raise HubError(f"{name} or its scales are infinite or NaN: damaged; copy or download it again")
    return numbers
