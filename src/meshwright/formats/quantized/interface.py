"""Interface of a format of quantized folders: how it is recognized, read and written.

Tensors of a model's files keep Hugging Face's names and order. A format decides how a matrix is stored.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.formats.hub.directory import HEAD, check_tied
from meshwright.formats.hub.weight_names import IGNORED, SAME, STACKED, Binding, bindings
from meshwright.formats.safetensors import Planned, Stored, stored_tensors
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.model.quantized_weights import quantizable, quantized_name
from meshwright.model.transformer import Transformer
from meshwright.spec.errors import HubError, argument
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.spec.model.shape import ModelShape

Weights = Iterable[tuple[str, Tensor | QuantizedMatrix]]
"""A model's parameters by our names."""
Wanted = Callable[[str], bool]
NATIVE = argument("format", "meshwright")
"""The format that holds every scheme, as refusals of the others name it."""


def every(name: str) -> bool:
    """Return True: all weights are wanted."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModel:
    """Schemes of the matrices of a model, from which its files can be planned."""

    shape: ModelShape
    schemes: Mapping[str, Scheme]
    """Scheme of each quantized matrix."""
    outlier_columns: Mapping[str, int]
    """Number of columns that are not quantized, of matrices with any."""
    dtype: torch.dtype
    """Dtype of everything else."""

    @property
    def skipped(self) -> list[str]:
        """Matrices that could be quantized and are not."""
        return [name for name in quantizable(self.shape) if name not in self.schemes]


class QuantizedFormat(Protocol):
    """Format of a folder with codes. `name` is its word on the command line and the config's quant_method."""

    name: str

    def refusal(self, model: QuantizedModel) -> str:
        """Return why the format cannot hold the model. Empty = it can."""

    def planned(self, model: QuantizedModel) -> list[Planned]:
        """List every tensor of the files, in order."""

    def encoded(self, model: QuantizedModel, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the files as weights arrive."""

    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """Return the config's entry about quantization."""

    def described(
        self, folder: Path, shape: ModelShape, dtype: torch.dtype, config: Mapping[str, Any]
    ) -> QuantizedModel:
        """Read from a folder which matrix has which scheme. Raises HubError when its files do not fit."""

    def decoded(
        self, folder: Path, model: QuantizedModel, wanted: Wanted = every
    ) -> Iterator[tuple[str, Tensor | dict[str, Tensor]]]:
        """Yield parameters by our names, layer after layer: a tensor, or the parts of a QuantizedMatrix by name.

        Tensors that are stored together are skipped when none of them is `wanted`.
        """


def fill(model: Transformer, weights: Iterable[tuple[str, Tensor | dict[str, Tensor]]]) -> None:
    """Copy the decoded weights into a model with room for them."""
    slots = model.state_dict()
    for name, weight in weights:
        parts = (
            {f"{quantized_name(name)}.{part}": tensor for part, tensor in weight.items()}
            if isinstance(weight, dict)
            else {name: weight}
        )
        # Copied into the model's memory, which may be on another device and in another dtype.
        for key, tensor in parts.items():
            slots[key].copy_(tensor)


PlanMatrix = Callable[[str, tuple[int, ...], Scheme, torch.dtype], list[Planned]]
"""Function (their name, size, scheme, dtype of numbers) -> tensors that stand for a matrix."""


class MatrixFormat(ABC):
    """The part of a QuantizedFormat that follows from its way to store one matrix."""

    @abstractmethod
    def plan_matrix(self, name: str, size: tuple[int, ...], scheme: Scheme, dtype: torch.dtype) -> list[Planned]:
        """Return the tensors that stand for a matrix of theirs. `dtype` is that of numbers."""

    @abstractmethod
    def encode_matrix(
        self, name: str, binding: Binding, matrix: QuantizedMatrix, model: QuantizedModel
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield those tensors for a matrix of ours, which `binding` pairs with theirs."""

    @abstractmethod
    def decode_matrix(
        self, stored: Mapping[str, Stored], name: str, size: tuple[int, ...], scheme: Scheme
    ) -> dict[str, Tensor]:
        """Return the parts of a QuantizedMatrix from those tensors, packed as ours are, for a matrix of theirs."""

    def planned(self, model: QuantizedModel) -> list[Planned]:
        """List every tensor of the files, in order."""
        return planned_tensors(model, self.plan_matrix)

    def encoded(self, model: QuantizedModel, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the files as weights arrive. A tied head is in no file."""
        binding_of = {name: binding for binding in bindings(model.shape) for name in binding.ours}
        for name, weight in weights:
            # Files hold the embedding once, and readers tie the head to it.
            if model.shape.tied and name == "head.weight":
                continue
            binding = binding_of[name]
            if isinstance(weight, QuantizedMatrix):
                yield from self.encode_matrix(name, binding, weight, model)
            else:
                yield from zip(binding.theirs, binding.transform.export([weight], model.shape), strict=True)

    def decoded(
        self, folder: Path, model: QuantizedModel, wanted: Wanted = every
    ) -> Iterator[tuple[str, Tensor | dict[str, Tensor]]]:
        """Yield parameters by our names, layer after layer, with the parts of quantized matrices."""
        stored = stored_tensors(folder)
        for binding in bindings(model.shape):
            if not any(map(wanted, binding.ours)):
                continue
            name, rows = next(iter(binding.ours)), [size[0] for size in binding.ours.values()]
            if name not in model.schemes:
                theirs = [stored[their].read() for their in binding.theirs]
                yield from zip(binding.ours, binding.transform.restore(theirs, rows, model.shape), strict=True)
                continue
            scheme = model.schemes[name]
            matrices = [self.decode_matrix(stored, their, size, scheme) for their, size in binding.theirs.items()]
            yield from _restored_parts(binding, matrices, model.shape)


def planned_tensors(model: QuantizedModel, plan_matrix: PlanMatrix) -> list[Planned]:
    """List every tensor of the files, in order. A router's correction stays in fp32."""
    planned = []
    for binding in bindings(model.shape):
        scheme = model.schemes.get(next(iter(binding.ours)))
        for name, size in binding.theirs.items():
            if scheme is not None:
                planned += plan_matrix(name, size, scheme, model.dtype)
                continue
            dtype = torch.float32 if name.endswith("correction_bias") else model.dtype
            planned.append(Planned(name=name, size=size, dtype=dtype))
    return planned


def skipped_modules(model: QuantizedModel, *, routers: bool = False) -> list[str]:
    """Return the names of their layers that could be quantized and are not, with those of `routers` on request."""
    return [
        their.removesuffix(".weight")
        for binding in bindings(model.shape)
        if (ours := next(iter(binding.ours))) in model.skipped or (routers and ours.endswith("router.weight"))
        for their in binding.theirs
    ]


def tensors_of_model(
    folder: Path, shape: ModelShape, planned: Sequence[Planned], stored: Mapping[str, Stored]
) -> dict[str, Stored]:
    """Return the stored tensors without redundant ones.

    These are tables of rotary positions, biases of zeros, which GPTQ's writers add to every matrix, and a tied
    head. Raises HubError when such a bias is not zero, or when such a head differs from its embedding.
    """
    names, tensors = {tensor.name for tensor in planned}, {}
    for name, tensor in stored.items():
        if name in names:
            tensors[name] = tensor
        elif name == HEAD and shape.tied:
            check_tied(folder, bindings(shape), lambda part: stored[part].read())
        elif name.endswith(".bias") and tensor.dtype.is_floating_point and not IGNORED.fullmatch(name):
            # A bias that is not zero would be dropped without a word.
            if bool(tensor.read().any()):
                raise HubError(
                    f"{folder}: {name} is not zero, but config.json gives a {shape.family} no bias there: set "
                    "attention_bias or mlp_bias in config.json, or copy the right file"
                )
        elif not IGNORED.fullmatch(name):
            tensors[name] = tensor
    return tensors


def _restored_parts(
    binding: Binding, matrices_of_theirs: Sequence[dict[str, Tensor]], shape: ModelShape
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield our matrices by name from parts of theirs. Where rows are cut apart, parts for columns go to each."""
    rows = [size[0] for size in binding.ours.values()]
    ours_by_name: list[dict[str, Tensor]] = [{} for _ in binding.ours]
    for part in matrices_of_theirs[0]:
        theirs = [parts[part] for parts in matrices_of_theirs]
        # An order is that of inputs, which matrices of ours share where theirs is cut into rows.
        cut = part == "order" and binding.transform not in (SAME, STACKED)
        ours = [theirs[0]] * len(rows) if cut else binding.transform.restore(theirs, rows, shape)
        for matrix, tensor in zip(ours_by_name, ours, strict=True):
            matrix[part] = tensor.contiguous()
    yield from zip(binding.ours, ours_by_name, strict=True)
