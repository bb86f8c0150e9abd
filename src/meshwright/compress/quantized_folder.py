"""Folders of quantized models, as they were written by us or by other software."""

from pathlib import Path
from typing import Any

from meshwright.compress.formats import FORMATS
from meshwright.compress.formats.folder_format import QuantizedModel
from meshwright.model.hub.directory import CONFIG, QUANTIZATION, HubFolder, read_json
from meshwright.spec.errors import HubError


def quant_method(path: Path) -> str:
    """The word of a folder's config for its format; empty where it has none."""
    found = (read_json(path / CONFIG) or {}).get(QUANTIZATION)
    return str(found.get("quant_method", "")) if isinstance(found, dict) else ""


def is_quantized(path: Path) -> bool:
    """Whether a folder is in one of our formats."""
    return quant_method(path) in FORMATS


def open_quantized(folder: HubFolder) -> QuantizedModel:
    """What it holds; HubError where config and files do not fit."""
    config: Any = (read_json(folder.path / CONFIG) or {}).get(QUANTIZATION)
    form = FORMATS.get(quant_method(folder.path))
    if form is None:
        raise HubError(f"{folder.path} is quantized in a format that is not read (read: {', '.join(FORMATS)})")
    return form.described(folder.path, folder.shape, folder.dtype, config)
