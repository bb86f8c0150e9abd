"""Names of models on the Hugging Face Hub: what one looks like, and the command that downloads it."""

import re
from pathlib import Path

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
LONGEST = 96
"""Characters that the hub allows in `ORG/NAME`."""
FILES = (".yaml", ".yml", ".json", ".gguf", ".safetensors")
"""Endings of files that people pass where they forget the leading `./`."""


def looks_like_hub_name(name: str) -> bool:
    """Whether a name could be `ORG/NAME` of the hub: one slash, and not the path of a file."""
    return len(name) <= LONGEST and HUB_NAME.fullmatch(name) is not None and Path(name).suffix not in FILES


def download_command(name: str, file: str = "") -> str:
    """The command that puts a model of the hub, or one file of it, into a folder of its own name."""
    return " ".join(("hf download", name, *((file,) if file else ()), "--local-dir", name.rpartition("/")[2]))


def download_hint(name: str) -> str:
    """A sentence for a model that does not exist here but has a name as on the hub; otherwise empty."""
    if not looks_like_hub_name(name):
        return ""
    folder = name.rpartition("/")[2]
    return f". To use the model of that name on the Hugging Face Hub, run `{download_command(name)}` and give {folder}"
