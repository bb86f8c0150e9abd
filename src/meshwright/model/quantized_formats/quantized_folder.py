"""Folders of quantized models, as they were written by us or by other software."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.kernels.quantized_matrix import QuantizedMatrix
from meshwright.model.hub.directory import HubFolder, import_folder
from meshwright.model.hub.weights import check_numbers
from meshwright.model.quantized_formats.folder_format import QuantizedFormat, QuantizedModel, Wanted, every
from meshwright.model.quantized_formats.folder_quantization import NUMBERS, is_quantized, quant_method, quantization
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import HubError
from meshwright.spec.quantization_schemes import Scheme
from meshwright.spec.scheme_names import base_name, layout

CODES_OF_A_BYTE = 4
"""At most: none has fewer than 2 bits."""
WHOLE = "take the folder that it was quantized from, with model.lora.base=nf4"


def _formats() -> Mapping[str, QuantizedFormat]:
    """Their readers, loaded for a folder that is quantized."""
    from meshwright.model.quantized_formats.format_table import FORMATS

    return FORMATS


def open_folder(path: Path) -> HubFolder:
    """A Hugging Face directory, quantized or not. HubError."""
    method = quant_method(path)
    if method not in ("", NUMBERS, *_formats()):
        raise HubError(
            f"{path} is quantized by {method!r}, which is not supported (supported: {', '.join(_formats())}): "
            "take the folder that it was quantized from"
        )
    return import_folder(path, quantized=is_quantized(path))


def open_numbers(path: Path) -> HubFolder:
    """A Hugging Face directory of numbers. HubError also where it holds codes, whichever of its files says so."""
    if is_quantized(path):
        raise HubError(
            f"{path} holds codes, by {quant_method(path)!r}, and numbers are needed: take the folder that it "
            "was quantized from"
        )
    return open_folder(path)


def open_quantized(folder: HubFolder) -> QuantizedModel:
    """What it holds; HubError where config and files do not fit."""
    config = quantization(folder.path)
    form = _formats().get(str(config.get("quant_method")))
    if form is None:
        raise HubError(f"{folder.path} is quantized in a format that is not read (read: {', '.join(_formats())})")
    files = filter(Path.is_file, folder.path.glob("*.safetensors"))  # a link may lead nowhere
    check_numbers(folder.path, folder.shape, CODES_OF_A_BYTE * sum(file.stat().st_size for file in files))
    return form.described(folder.path, folder.shape, folder.dtype, config)


def decoded_weights(
    folder: Path, model: QuantizedModel, wanted: Wanted = every
) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
    """Parameters by our names, layer after layer; matrices as the codes that files hold. Of what is stored together and
    not `wanted` at all nothing is read. HubError where a file is damaged."""
    sizes = quantizable(model.shape)
    for name, found in decoded_parts(folder, model, wanted):
        if isinstance(found, Tensor):
            yield name, found
            continue
        parts: dict[str, Any] = dict(found)
        yield name, QuantizedMatrix(scheme=model.schemes[name], size_in=sizes[name][-1], keeps_copies=False, **parts)


def decoded_parts(
    folder: Path, model: QuantizedModel, wanted: Wanted = every
) -> Iterator[tuple[str, Tensor | dict[str, Tensor]]]:  # fmt: skip
    """As decoded_weights, with the tensors of a matrix by name. HubError also where one is infinite or NaN: short
    sequences hide that, since torch's attention makes numbers of queries that are none."""
    for name, found in _formats()[quant_method(folder)].decoded(folder, model, wanted):
        for part, tensor in found.items() if isinstance(found, dict) else ():
            if tensor.is_floating_point() and not _finite(tensor):
                raise HubError(
                    f"{folder}: {name}.{part} has numbers that are infinite or NaN: damaged; quantize the model again"
                )
        yield name, found


def _finite(tensor: Tensor) -> bool:
    wide = tensor.half() if tensor.dtype.itemsize == 1 else tensor  # torch asks no 8-bit number
    return bool(wide.isfinite().all())


def base_of(folder: HubFolder, model: QuantizedModel) -> str:
    """As which `model.lora.base` its codes are held beside adapters. HubError where nothing can be trained beside them,
    or not all matrices have codes of one layout."""
    held: dict[Scheme, str] = {}
    for name, scheme in model.schemes.items():
        held.setdefault(layout(scheme), name)
        if scheme.ordered:
            raise HubError(
                f"{folder.path} holds {name} with inputs in another order (GPTQ's desc_act), beside which no adapter "
                f"is trained: {WHOLE}"
            )
        if not replace(layout(scheme), threshold=scheme.threshold).trains_beside:
            raise HubError(
                f"{folder.path} rounds activations, too ({scheme.name}), and adapters are trained beside rounded "
                f"weights alone: {WHOLE}"
            )
    if model.skipped:
        raise HubError(
            f"{folder.path} holds {model.skipped[0]} as numbers and other matrices as codes. Adapters need "
            f"one kind throughout: {WHOLE}"
        )
    if len(held) > 1:
        names = " and ".join(f"{name} as {base_name(one)}" for one, name in list(held.items())[:2])
        raise HubError(f"{folder.path} holds {names}, and the base of adapters is of one kind: {WHOLE}")
    return base_name(replace(next(iter(held)), name=next(iter(model.schemes.values())).name))
