"""Our own layout: every scheme, every family, tensors under the names of the model.

layers.0.mlp.up.weight.codes, .scales, .zeros, .columns, .kept     as kernels/quantized_matrix.py has them
embed.weight                                                        everything else, as it was
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from meshwright.kernels.quantized_matrix import PARTS, QuantizedMatrix
from meshwright.model.hub.safetensors_files import Planned, Stored, stored_tensors
from meshwright.model.hub.weight_names import tensor_sizes
from meshwright.model.quantized_formats.folder_format import QuantizedModel, Wanted, Weights, every
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import HubError
from meshwright.spec.quantization_schemes import SCHEMES, Scheme
from meshwright.spec.shape import ModelShape

VERSION = 1


class NativeFormat:
    """See above."""

    name = "meshwright"

    def refusal(self, model: QuantizedModel) -> str:
        """It holds everything."""
        return ""

    def planned(self, model: QuantizedModel) -> list[Planned]:
        """As QuantizedFormat."""
        found = []
        for name, size in tensor_sizes(model.shape).items():
            if name not in model.schemes:
                dtype = torch.float32 if name.endswith("correction_bias") else model.dtype
                found.append(Planned(name=name, size=size, dtype=dtype))
                continue
            *stack, rows, columns = size
            num_outliers = model.outlier_columns.get(name, 0)
            for part, (dims, kind) in model.schemes[name].sizes(rows, columns, stack, kept=num_outliers).items():
                found.append(Planned(name=f"{name}.{part}", size=dims, dtype=getattr(torch, kind)))
            if num_outliers:
                found.append(Planned(name=f"{name}.kept", size=(*stack, rows, num_outliers), dtype=model.dtype))
        return found

    def encoded(self, model: QuantizedModel, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """As QuantizedFormat."""
        for name, found in weights:
            if isinstance(found, QuantizedMatrix):
                yield from ((f"{name}.{part}", tensor) for part, tensor in found.tensors.items())
            else:
                yield name, found

    def config(self, model: QuantizedModel) -> dict[str, Any]:
        """Schemes by name, and which matrices have which; those without are not quantized."""
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
        """As QuantizedFormat."""
        if config.get("version") != VERSION:
            raise HubError(
                f"{folder} is quantized in version {config.get('version')} of the layout; this reads {VERSION}"
            )
        schemes = _schemes(folder, config)
        sizes, stored = quantizable(shape), stored_tensors(folder)
        unknown = [name for name in schemes if name not in sizes]
        if unknown:
            raise HubError(f"{folder}/config.json quantizes {unknown[0]}, which is no matrix of this shape")
        outlier_columns = {}
        for name in schemes:
            found = stored.get(f"{name}.columns")
            if found is not None and (len(found.size) != 1 or not 0 < found.size[0] <= sizes[name][-1]):
                raise HubError(f"{folder}: {name}.columns is {list(found.size)}: damaged; quantize the model again")
            if found is not None:
                outlier_columns[name] = found.size[0]
        model = QuantizedModel(shape=shape, schemes=schemes, outlier_columns=outlier_columns, dtype=dtype)
        check(folder, self.planned(model), stored)
        return model

    def decoded(
        self, folder: Path, model: QuantizedModel, wanted: Wanted = every
    ) -> Iterator[tuple[str, Tensor | dict[str, Tensor]]]:
        """As QuantizedFormat."""
        stored = stored_tensors(folder)
        for name in filter(wanted, tensor_sizes(model.shape)):
            if name not in model.schemes:
                yield name, stored[name].read()
                continue
            parts = {part: stored[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in stored}
            read = {part: one.read() for part, one in parts.items()}
            _check_columns(folder, name, read, quantizable(model.shape)[name][-1])
            yield name, read


def check(folder: Path, planned: list[Planned], stored: Mapping[str, Stored]) -> None:
    """HubError where the files of a folder hold other tensors than they should."""
    missing = [one.name for one in planned if one.name not in stored]
    extra = stored.keys() - {one.name for one in planned}
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"holds {min(extra)}, which its config does not name"
        raise HubError(f"{folder} {what}: it is damaged or not whole; quantize the model again")
    for one in planned:
        found = stored[one.name]
        alike = found.dtype == one.dtype or (_is_wide(found.dtype) and _is_wide(one.dtype))
        if found.size != one.size or not alike:
            raise HubError(
                f"{folder}: {one.name} is {list(found.size)} {found.dtype} where {list(one.size)} {one.dtype} belongs"
            )


def _is_wide(dtype: torch.dtype) -> bool:
    """Whether numbers mean the same in another such dtype. Those of 8 bits do not: they want a scale beside them."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _schemes(folder: Path, config: Mapping[str, Any]) -> dict[str, Scheme]:
    try:
        named = {name: _scheme(values) for name, values in config["schemes"].items()}
        return {name: named[scheme] for name, scheme in config["matrices"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{folder}/config.json has a damaged quantization_config ({error!r})") from error


def _scheme(values: Mapping[str, Any]) -> Scheme:
    kinds = {one.name: type(getattr(SCHEMES["int8"], one.name)) for one in fields(Scheme)}
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    words = {key: get_args(hint) for key, hint in get_type_hints(Scheme).items() if get_origin(hint) is Literal}
    for key, value in given.items():
        if not isinstance(value, kinds[key]) or value not in words.get(key, (value,)):
            raise TypeError(f"{key}={value!r}")
    return Scheme(**given)


def _check_columns(folder: Path, name: str, parts: Mapping[str, Tensor], inputs: int) -> None:
    columns = parts.get("columns")
    if columns is not None and (int(columns.min()) < 0 or int(columns.max()) >= inputs):
        raise HubError(f"{folder}: {name}.columns names inputs beyond {inputs}: damaged; quantize the model again")
