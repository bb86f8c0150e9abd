"""JSON files of a Hugging Face directory, read without torch: the config and the model's shape."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.formats.hub.config import dtype_from_config, shape_from_config
from meshwright.spec.errors import HubError
from meshwright.spec.hub_names import explain_missing
from meshwright.spec.model.shape import ModelShape

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
QUANTIZATION = "quantization_config"
"""Key of a config that describes how weights are quantized."""
MOST_JSON_BYTES = 2**24
"""Largest file read beside the weights. The largest published config has 2**18 bytes."""
MOST_TOKENIZER_BYTES = 2**27
"""Largest tokenizer read. One of 262,144 words has 2**25 bytes."""
TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def read_config(folder: Path, *, quantized: bool = False) -> tuple[dict[str, Any], ModelShape, str]:
    """Return the config of a directory, its shape, and the name of its weights' dtype. Raises HubError.

    With `quantized` the caller reads the config's quantization itself.
    """
    if not folder.is_dir():
        instead = "a Hugging Face directory with config.json and *.safetensors"
        raise HubError(
            f"{folder} is a file: give {instead}" if folder.exists() else explain_missing(str(folder), instead)
        )
    config = read_json(folder / CONFIG)
    if config is None:
        also = f"; it is a run: `meshwright export {folder} OUT` makes one" if (folder / "plan.yaml").is_file() else ""
        if (folder / "adapter_config.json").is_file():
            also = "; it is an adapter: give its base, or export the run without --adapter, which merges both"
        raise HubError(f"{folder} has no {CONFIG}: it is no Hugging Face directory{also}")
    known = {key: value for key, value in config.items() if not quantized or key != QUANTIZATION}
    try:
        shape, dtype = shape_from_config(known), dtype_from_config(config)
    except HubError as error:
        raise HubError(f"{folder}/{error}") from error
    return config, replace(shape, name=folder.resolve().name), dtype


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file, or None if there is no file. Raises HubError for other contents."""
    if not path.is_file():
        return None
    most = MOST_TOKENIZER_BYTES if path.name in (TOKENIZER, TOKENIZER_CONFIG) else MOST_JSON_BYTES
    if path.stat().st_size > most:
        raise HubError(f"{path} has {path.stat().st_size:,} bytes, and at most {most:,} are read")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise HubError(f"{path} is not JSON, or nested too deep ({error}): copy or download it again") from error
    if not isinstance(content, dict):
        raise HubError(f"{path} must hold a JSON object")
    return content
