"""What formats under the names of Hugging Face have in common: which tensors a model's files hold, and in which order.
A format says what becomes of a quantized matrix."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.model.hub.safetensors_files import Planned
from meshwright.model.hub.weight_names import Binding, bindings
from meshwright.model.quantized_formats.folder_format import QuantizedModel, Weights
from meshwright.spec.quantization_schemes import Scheme

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
