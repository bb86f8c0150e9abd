"""What formats under the names of Hugging Face have in common: which tensors a model's files hold, and in which order.
A format says what becomes of a quantized matrix."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.model.hub.safetensors_files import Planned, Stored
from meshwright.model.hub.transforms import SAME, STACKED
from meshwright.model.hub.weight_names import IGNORED, Binding, bindings
from meshwright.model.hub.weights import HEAD, check_tied
from meshwright.model.quantized_formats.folder_format import QuantizedModel, Weights
from meshwright.spec.errors import HubError
from meshwright.spec.quantization_schemes import Scheme
from meshwright.spec.shape import ModelShape

PlanMatrix = Callable[[str, tuple[int, ...], Scheme], list[Planned]]
"""(their name, size, scheme) -> the tensors that stand for a matrix."""
EncodeMatrix = Callable[[str, Binding, QuantizedMatrix], Iterator[tuple[str, Tensor]]]
"""(our name, its binding, matrix) -> those tensors."""


def planned_tensors(model: QuantizedModel, plan_matrix: PlanMatrix) -> list[Planned]:
    """Every tensor of the files, in order. A router's correction stays in fp32."""
    found = []
    for binding in bindings(model.shape):
        scheme = model.schemes.get(next(iter(binding.ours)))
        for name, size in binding.theirs.items():
            if scheme is not None:
                found += plan_matrix(name, size, scheme)
                continue
            dtype = torch.float32 if name.endswith("correction_bias") else model.dtype
            found.append(Planned(name=name, size=size, dtype=dtype))
    return found


def tensors_of_model(
    folder: Path, shape: ModelShape, planned: Sequence[Planned], stored: Mapping[str, Stored]
) -> dict[str, Stored]:
    """Stored tensors but those that say nothing: tables of rotary positions, biases of zeros, which GPTQ's writers put
    beside every matrix, and a tied head beside its embedding. HubError where a bias or a head says something."""
    names, told = {tensor.name for tensor in planned}, {}
    for name, tensor in stored.items():
        if name in names:
            told[name] = tensor
        elif name == HEAD and shape.tied:
            check_tied(folder, bindings(shape), lambda part: stored[part].read())
        elif name.endswith(".bias") and tensor.dtype.is_floating_point and not IGNORED.fullmatch(name):
            if bool(tensor.read().any()):
                raise HubError(
                    f"{folder}: {name} is not zero, but config.json gives a {shape.family} no bias there: set "
                    "attention_bias or mlp_bias in config.json, or copy the right file"
                )
        elif not IGNORED.fullmatch(name):
            told[name] = tensor
    return told


def restored_parts(
    binding: Binding, each: Sequence[dict[str, Tensor]], shape: ModelShape
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Matrices of ours, by name, from the parts of those of theirs that hold them. Of rows that are cut apart, what
    belongs to columns goes to each."""
    rows = [size[0] for size in binding.ours.values()]
    matrices: list[dict[str, Tensor]] = [{} for _ in binding.ours]
    for part in each[0]:
        theirs = [parts[part] for parts in each]
        cut = part == "order" and binding.transform not in (SAME, STACKED)
        ours = [theirs[0]] * len(rows) if cut else binding.transform.restore(theirs, rows, shape)
        for matrix, tensor in zip(matrices, ours, strict=True):
            matrix[part] = tensor.contiguous()
    yield from zip(binding.ours, matrices, strict=True)


def encoded_tensors(
    model: QuantizedModel, weights: Weights, encode_matrix: EncodeMatrix
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """The same tensors as weights come. A tied head is in no file."""
    binding_of = {name: binding for binding in bindings(model.shape) for name in binding.ours}
    for name, found in weights:
        if model.shape.tied and name == "head.weight":
            continue
        binding = binding_of[name]
        if isinstance(found, QuantizedMatrix):
            yield from encode_matrix(name, binding, found)
        else:
            yield from zip(binding.theirs, binding.transform.export([found], model.shape), strict=True)
