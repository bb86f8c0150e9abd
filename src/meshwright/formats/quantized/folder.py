"""Folders of quantized models, written by us or by other software."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.formats.hub.directory import HubFolder, check_numbers, import_folder
from meshwright.formats.quantized.detection import NUMBERS, is_quantized, quant_method, quantization
from meshwright.formats.quantized.interface import QuantizedFormat, QuantizedModel, Wanted, every
from meshwright.kernels.quantized.matrix import PARTS, QuantizedMatrix
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import HubError
from meshwright.spec.model.quantization_schemes import Scheme, base_name, layout

CODES_OF_A_BYTE = 4
"""Most codes in a byte: none has fewer than 2 bits."""
WHOLE = "take the folder that it was quantized from, with model.lora.base=nf4"


def _formats() -> Mapping[str, QuantizedFormat]:
    """Return the formats. Their readers are loaded only for a folder that is quantized."""
    from meshwright.formats.quantized.table import FORMATS

    return FORMATS


def open_folder(path: Path) -> HubFolder:
    """Open a Hugging Face directory, quantized or not. Raises HubError."""
    method = quant_method(path)
    if method not in ("", NUMBERS, *_formats()):
        raise HubError(
            f"{path} is quantized by {method!r}, which is not supported (supported: {', '.join(_formats())}): "
            "take the folder that it was quantized from"
        )
    return import_folder(path, quantized=is_quantized(path))


def open_numbers(path: Path) -> HubFolder:
    """Open a Hugging Face directory of numbers. Raises HubError when any of its files says that it holds codes."""
    if is_quantized(path):
        raise HubError(
            f"{path} holds codes, by {quant_method(path)!r}, and numbers are needed: take the folder that it "
            "was quantized from"
        )
    return open_folder(path)


def open_quantized(folder: HubFolder) -> QuantizedModel:
    """Read which matrix has which scheme. Raises HubError when config and files do not fit."""
    config = quantization(folder.path)
    reader = _formats().get(str(config.get("quant_method")))
    if reader is None:
        raise HubError(
            f"{folder.path} is quantized in a format that is not supported (supported: {', '.join(_formats())})"
        )
    # A symbolic link may be dangling.
    files = filter(Path.is_file, folder.path.glob("*.safetensors"))
    check_numbers(folder.path, folder.shape, CODES_OF_A_BYTE * sum(file.stat().st_size for file in files))
    return reader.described(folder.path, folder.shape, folder.dtype, config)


def decoded_weights(
    folder: Path, model: QuantizedModel, wanted: Wanted = every
) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
    """Yield parameters like decoded_parts, with each matrix as a QuantizedMatrix."""
    sizes = quantizable(model.shape)
    for name, weight in decoded_parts(folder, model, wanted):
        if isinstance(weight, Tensor):
            yield name, weight
            continue
        parts: dict[str, Any] = {PARTS[part]: tensor for part, tensor in weight.items()}
        yield name, QuantizedMatrix(scheme=model.schemes[name], size_in=sizes[name][-1], keeps_copies=False, **parts)


def decoded_parts(
    folder: Path, model: QuantizedModel, wanted: Wanted = every
) -> Iterator[tuple[str, Tensor | dict[str, Tensor]]]:  # fmt: skip
    """Yield wanted parameters by our names, layer after layer, with the tensors of a matrix by name.

    Raises HubError for damaged files, infinite numbers and NaN. Short sequences hide these, since torch's attention
    turns NaN queries into numbers.
    """
    for name, weight in _formats()[quant_method(folder)].decoded(folder, model, wanted):
        for part, tensor in weight.items() if isinstance(weight, dict) else ():
            if tensor.is_floating_point() and not _is_finite(tensor):
                raise HubError(
                    f"{folder}: {name}.{part} has numbers that are infinite or NaN: damaged; quantize the model again"
                )
        yield name, weight


def _is_finite(tensor: Tensor) -> bool:
    # torch has no isfinite for 8-bit numbers.
    wide = tensor.half() if tensor.dtype.itemsize == 1 else tensor
    return bool(wide.isfinite().all())


def base_of(folder: HubFolder, model: QuantizedModel) -> str:
    """Return the `model.lora.base` of the codes. Raises HubError when no adapter can be trained on them."""
    held: dict[Scheme, str] = {}
    for name, scheme in model.schemes.items():
        # Names and expectations of schemes differ between writers; layouts decide.
        held.setdefault(layout(scheme), name)
        if scheme.ordered:
            raise HubError(
                f"{folder.path} holds {name} with inputs in another order (GPTQ's desc_act), on which no adapter "
                f"is trained: {WHOLE}"
            )
        if not replace(layout(scheme), threshold=scheme.threshold).trains_beside:
            raise HubError(
                f"{folder.path} rounds activations, too ({scheme.name}), and adapters are trained on rounded "
                f"weights alone: {WHOLE}"
            )
    if model.skipped:
        raise HubError(
            f"{folder.path} holds {model.skipped[0]} as numbers and other matrices as codes. Adapters need "
            f"one kind throughout: {WHOLE}"
        )
    if len(held) > 1:
        names = " and ".join(f"{name} as {base_name(scheme)}" for scheme, name in list(held.items())[:2])
        raise HubError(f"{folder.path} holds {names}, and the base of adapters is of one kind: {WHOLE}")
    return base_name(replace(next(iter(held)), name=next(iter(model.schemes.values())).name))
