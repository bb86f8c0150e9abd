"""The config.json of a model by its name on the Hugging Face Hub, where the hub can be reached."""

import re
from pathlib import Path

from meshwright.spec import presets
from meshwright.spec.errors import ArgumentError, PlanError

CONFIG = "config.json"
INSTEAD = f"download its {CONFIG} and give the path, as `plan ./{CONFIG}`"
SECONDS = 10.0
"""How long the hub is waited for."""


def is_hub_name(model: str) -> bool:
    """Whether this is `OWNER/NAME`, and neither a path that is there nor a preset."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith(".") or Path(model).exists():
        return False
    if Path(model).suffix in (".yaml", ".yml", ".json"):
        return False
    try:
        presets.published(model)
    except PlanError:
        return True
    return False


def config_folder(name: str) -> Path:
    """A folder with the config.json of a model, fetched or kept from before. ArgumentError where there is none: what to
    do instead."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        raise ArgumentError(
            f"model={name!r} is no preset and no folder, and huggingface_hub is not installed to fetch its {CONFIG}: "
            f"pip install huggingface_hub, or {INSTEAD}"
        ) from None
    try:
        return Path(hf_hub_download(name, CONFIG, etag_timeout=SECONDS)).parent
    except GatedRepoError:
        raise ArgumentError(f"model={name!r}: its files are given to who accepts its terms; {INSTEAD}") from None
    except RepositoryNotFoundError:
        near = presets.suggested(name.rpartition("/")[2].lower(), presets.model_names())
        raise ArgumentError(f"model={name!r} is not on the Hugging Face Hub; presets {near}") from None
    except (LocalEntryNotFoundError, OSError, ValueError):
        raise ArgumentError(
            f"model={name!r} is no preset and no folder, and the Hugging Face Hub cannot be reached: {INSTEAD}"
        ) from None
