"""Interface of a format of quantized folders."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.formats.safetensors.files import Planned
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.model.quantized_weights import quantizable, quantized_name
from meshwright.model.transformer import Transformer
from meshwright.spec.errors import argument
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
        for key, tensor in parts.items():
            slots[key].copy_(tensor)
