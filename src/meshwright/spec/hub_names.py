"""Names of models on the Hugging Face Hub and paths of folders: tell them apart, and advise when a path is missing."""

import re
from difflib import get_close_matches
from pathlib import Path

from meshwright.spec.errors import argument

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
LONGEST = 96
"""Characters that the hub allows in `ORG/NAME`."""
FILES = (".yaml", ".yml", ".json", ".gguf", ".safetensors")
"""Endings of files whose leading `./` people forget."""
FOLDERS = frozenset(
    ("adapters", "checkpoints", "ckpt", "ckpts", "configs", "data", "datasets", "experiments", "exports", "hf", "logs",
     "models", "out", "output", "outputs", "results", "run", "runs", "tmp", "weights")
)  # fmt: skip
"""Usual first words of paths to own folders."""
LISTED = 3
"""Most neighbours of a missing folder that a message names."""


def looks_like_hub_name(name: str) -> bool:
    """Return whether a name could be `ORG/NAME` of the hub: one slash, no file ending, no usual folder in front.

    A revision may follow, as `ORG/NAME@main`.
    """
    name = split_revision(name)[0]
    if len(name) > LONGEST or HUB_NAME.fullmatch(name) is None or Path(name).suffix in FILES:
        return False
    return name.partition("/")[0].lower() not in FOLDERS


def split_revision(name: str) -> tuple[str, str]:
    """Return (ORG/NAME, revision) of a name with or without `@REVISION`."""
    repository, _, revision = name.partition("@")
    return repository, revision or "main"


def explain_missing(name: str, instead: str, key: str = "") -> str:
    """Return the message for a path that does not exist: what to give `instead`, and where the model may be.

    It ends with the command that downloads a model of that name, or else with the neighbours of the path. `key` is the
    argument that named the path.
    """
    return f"{argument(key, name) if key else name} does not exist: give {instead}{whereabouts(name, key)}"


def whereabouts(name: str, key: str = "") -> str:
    """Return the end of the message of `explain_missing`. `key` is the argument that takes a model."""
    return download_hint(name, key) or _beside(Path(name))


def shape_alone(name: str, preset: str) -> list[str]:
    """Return a note that a hub name stands for a preset, whose weights are not downloaded."""
    note = f"model={name} is the shape of {preset}: weights are drawn anew; "
    note += f"for those of the hub give model={name}@main, or model=FOLDER"
    return [note] if looks_like_hub_name(name) else []


def _beside(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir() and entry.name[0] != ".")
    # the parent may be missing or unreadable, too: it has no neighbours to name
    except OSError:
        return ""
    close = get_close_matches(path.name, names, LISTED)
    if close or path.parent == Path():  # all folders of the working directory would be noise
        return f"; nearest: {', '.join(str(path.parent / folder) for folder in close)}" if close else ""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"; {path.parent} holds {', '.join(names[:LISTED]) + more if names else 'no folder'}"


def download_command(name: str, file: str = "") -> str:
    """Return the command that downloads a model, or one file of it, into a folder of its own name."""
    repository, revision = split_revision(name)
    words = (*((file,) if file else ()), *(("--revision", revision) if "@" in name else ()))
    return " ".join(("hf download", repository, *words, "--local-dir", repository.rpartition("/")[2]))


def download_hint(name: str, key: str = "") -> str:
    """Return how to download a model whose missing path looks like a name of the hub. Empty = it does not."""
    owner = Path(name.partition("/")[0])
    # A folder with models in it may be named after their owner, as downloads of several are.
    is_local = owner.is_dir() and not any(owner.glob("*/config.json"))
    if is_local or not looks_like_hub_name(name):
        return ""
    folder = split_revision(name)[0].rpartition("/")[2]
    folder = argument(key, folder) if key else folder
    return f". To use the model of that name on the Hugging Face Hub, run `{download_command(name)}` and give {folder}"
