"""What a format of quantized folders says about itself."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.model.hub.safetensors_files import Planned
from meshwright.model.quantized_weights import quantizable, quantized_name
from meshwright.model.transformer import Transformer
from meshwright.spec.quantization_schemes import Scheme
from meshwright.spec.shape import ModelShape

Weights = Iterable[tuple[str, Tensor | QuantizedMatrix]]
"""A model's parameters by our names."""
Wanted = Callable[[str], bool]


def every(name: str) -> bool:
    """As Wanted: all of them."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedModel:
    """Which matrices of a model have which scheme; what a file of it needs to be planned."""

    shape: ModelShape
    schemes: Mapping[str, Scheme]
    """Of each matrix that is quantized."""
    outlier_columns: Mapping[str, int]
    """Columns that are not, of matrices that have any."""
    dtype: torch.dtype
    """Of everything else."""

    @property
    def skipped(self) -> list[str]:
        """Matrices that could be quantized and are not."""
        return [name for name in quantizable(self.shape) if name not in self.schemes]


class QuantizedFormat(Protocol):
    """How a folder holds codes. `name` is the word for it on the command line, and the config's quant_method."""

    name: str

    def refusal(self, model: QuantizedModel) -> str:
        """Why it cannot hold the model; empty where it can."""

    def planned(self, model: QuantizedModel) -> list[Planned]:
        """Every tensor of its files, in order."""

    def encoded(self, model: QuantizedModel, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """The tensors of its files, as weights come."""

    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """The config's entry about quantization."""

    def described(
        self, folder: Path, shape: ModelShape, dtype: torch.dtype, config: Mapping[str, Any]
    ) -> QuantizedModel:
        """What a folder holds, from its config and the headers of its files. HubError where they do not fit."""

    def decoded(
        self, folder: Path, model: QuantizedModel, wanted: Wanted = every
    ) -> Iterator[tuple[str, Tensor | dict[str, Tensor]]]:
        """Parameters by our names, layer after layer: a tensor, or those of a QuantizedMatrix by name. Of what is
        stored together and not `wanted` at all nothing is read."""


def fill(model: Transformer, weights: Iterable[tuple[str, Tensor | dict[str, Tensor]]]) -> None:
    """Put what a format has decoded into a model with room for it."""
    places = model.state_dict()
    for name, found in weights:
        parts = (
            {f"{quantized_name(name)}.{part}": one for part, one in found.items()}
            if isinstance(found, dict)
            else {name: found}
        )
        for where, tensor in parts.items():
            places[where].copy_(tensor)
