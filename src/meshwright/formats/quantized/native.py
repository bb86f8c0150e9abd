"""Our own layout: every scheme and family, with tensors under the names of the model.

layers.0.mlp.up.weight.codes, .scales, .zeros, .columns, .kept     as kernels/quantized/matrix.py has them
embed.weight                                                        everything else, unchanged
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.formats.quantized.interface import QuantizedModel, Wanted, Weights, every
from meshwright.formats.safetensors import Planned, Stored, stored_tensors
from meshwright.kernels.quantized.matrix import PARTS, QuantizedMatrix
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import HubError
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme
from meshwright.spec.model.shape import ModelShape

VERSION = 1


class NativeFormat:
    """Layout described above."""

    name = "meshwright"

    def refusal(self, model: QuantizedModel) -> str:
        """Return an empty string: the format holds every model."""
        return ""

    def planned(self, model: QuantizedModel) -> list[Planned]:
        """List every tensor of the files, in order."""
        tensors = []
        for name, size in tensor_sizes(model.shape).items():
            if name not in model.schemes:
                dtype = torch.float32 if name.endswith("correction_bias") else model.dtype
                tensors.append(Planned(name=name, size=size, dtype=dtype))
                continue
            *stack, rows, columns = size
            num_outliers = model.outlier_columns.get(name, 0)
            for part, (dims, kind) in (
                model.schemes[name].sizes(rows, columns, stack, outlier_columns=num_outliers).items()
            ):
                tensors.append(Planned(name=f"{name}.{part}", size=dims, dtype=getattr(torch, kind)))
            if num_outliers:
                tensors.append(Planned(name=f"{name}.kept", size=(*stack, rows, num_outliers), dtype=model.dtype))
        return tensors

    def encoded(self, model: QuantizedModel, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the files as weights arrive."""
        for name, weight in weights:
            if isinstance(weight, QuantizedMatrix):
                yield from ((f"{name}.{part}", tensor) for part, tensor in weight.tensors.items())
            else:
                yield name, weight

    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """Return the schemes by name, and the scheme of each quantized matrix."""
        schemes = {scheme.name: asdict(scheme) for scheme in model.schemes.values()}
        return {
            "quant_method": self.name,
            "version": VERSION,
            "schemes": {
                name: {**values, "expected_kl": list(values["expected_kl"])} for name, values in schemes.items()
            },
            "matrices": {name: scheme.name for name, scheme in model.schemes.items()},
        }

    def described(
        self, folder: Path, shape: ModelShape, dtype: torch.dtype, config: Mapping[str, Any]
    ) -> QuantizedModel:
        """Read from the config and the headers of a folder which matrix has which scheme."""
        # Codes of another layout would be read as numbers, and none of them would look wrong.
        if config.get("version") != VERSION:
            raise HubError(
                f"{folder} is quantized in version {config.get('version')} of the layout; this reads {VERSION}"
            )
        schemes = _read_schemes(folder, config)
        sizes, stored = quantizable(shape), stored_tensors(folder)
        unknown = [name for name in schemes if name not in sizes]
        if unknown:
            raise HubError(f"{folder}/config.json quantizes {unknown[0]}, which is no matrix of this shape")
        outlier_columns = {}
        for name in schemes:
            columns = stored.get(f"{name}.columns")
            if columns is not None and (len(columns.size) != 1 or not 0 < columns.size[0] <= sizes[name][-1]):
                raise HubError(f"{folder}: {name}.columns is {list(columns.size)}: damaged; quantize the model again")
            if columns is not None:
                outlier_columns[name] = columns.size[0]
        model = QuantizedModel(shape=shape, schemes=schemes, outlier_columns=outlier_columns, dtype=dtype)
        check_tensors(folder, self.planned(model), stored)
        return model

    def decoded(
        self, folder: Path, model: QuantizedModel, wanted: Wanted = every
    ) -> Iterator[tuple[str, Tensor | dict[str, Tensor]]]:
        """Yield parameters by our names, layer after layer."""
        stored = stored_tensors(folder)
        for name in filter(wanted, tensor_sizes(model.shape)):
            if name not in model.schemes:
                yield name, stored[name].read()
                continue
            parts = {part: stored[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in stored}
            read = {part: tensor.read() for part, tensor in parts.items()}
            _check_columns(folder, name, read, quantizable(model.shape)[name][-1])
            yield name, read


def check_tensors(folder: Path, planned: list[Planned], stored: Mapping[str, Stored]) -> None:
    """Raise HubError if the files of a folder hold other tensors than planned."""
    missing = [tensor.name for tensor in planned if tensor.name not in stored]
    extra = stored.keys() - {tensor.name for tensor in planned}
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"holds {min(extra)}, which its config does not name"
        raise HubError(f"{folder} {what}: it is damaged or not whole; quantize the model again")
    for tensor in planned:
        actual = stored[tensor.name]
        alike = actual.dtype == tensor.dtype or (_is_wide(actual.dtype) and _is_wide(tensor.dtype))
        if actual.size != tensor.size or not alike:
            raise HubError(
                f"{folder}: {tensor.name} is {list(actual.size)} {actual.dtype} where "
                f"{list(tensor.size)} {tensor.dtype} belongs"
            )


def _is_wide(dtype: torch.dtype) -> bool:
    """Return True if numbers need no scale, so they mean the same in another such dtype."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _read_schemes(folder: Path, config: Mapping[str, Any]) -> dict[str, Scheme]:
    try:
        schemes = {name: _read_scheme(values) for name, values in config["schemes"].items()}
        return {name: schemes[scheme] for name, scheme in config["matrices"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{folder}/config.json has a damaged quantization_config ({error!r})") from error


def _read_scheme(values: Mapping[str, Any]) -> Scheme:
    kinds = {field.name: type(getattr(SCHEMES["int8"], field.name)) for field in fields(Scheme)}
    arguments: dict[str, Any] = {
        key: tuple(setting) if isinstance(setting, list) else setting for key, setting in values.items()
    }
    words = {key: get_args(hint) for key, hint in get_type_hints(Scheme).items() if get_origin(hint) is Literal}
    for key, setting in arguments.items():
        if not isinstance(setting, kinds[key]) or setting not in words.get(key, (setting,)):
            raise TypeError(f"{key}={setting!r}")
    return Scheme(**arguments)


def _check_columns(folder: Path, name: str, parts: Mapping[str, Tensor], inputs: int) -> None:
    columns = parts.get("columns")
    # An index beyond the inputs would read foreign memory in a kernel.
    if columns is not None and (int(columns.min()) < 0 or int(columns.max()) >= inputs):
        raise HubError(f"{folder}: {name}.columns names inputs beyond {inputs}: damaged; quantize the model again")
