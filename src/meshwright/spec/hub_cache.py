"""Models in the Hugging Face cache: the folder of `ORG/NAME` or `ORG/NAME@REVISION`, without a network.

The layout is that of huggingface_hub: `models--ORG--NAME/refs/REVISION` holds a commit, and `snapshots/COMMIT` its
files.
"""

import json
import os
from pathlib import Path

from meshwright.spec.hub_names import looks_like_hub_name, split_revision

INDEX = "model.safetensors.index.json"
CONFIGS = ("config.json", "adapter_config.json")


def cache_root() -> Path:
    """Return the folder of the hub's cache, by the variables that huggingface_hub reads."""
    home = os.environ.get("HF_HOME")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface" if not home else Path(home)
    return Path(os.environ.get("HF_HUB_CACHE") or base / "hub").expanduser()


def find_snapshot(name: str, file: str = "") -> Path | None:
    """Return the cached folder of a model of the hub. None = it is not there, or lacks what is needed.

    `file`: the only file that is needed. Empty = a config and all files of its weights.
    """
    if not looks_like_hub_name(name):
        return None
    repository, revision = split_revision(name)
    folder = cache_root() / f"models--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):  # a commit has no entry of its own
        commit = revision
    snapshot = folder / "snapshots" / commit
    is_there = (snapshot / file).is_file() if file else _is_whole(snapshot)
    return snapshot if is_there else None


def _is_whole(snapshot: Path) -> bool:
    """Return whether a snapshot has a config and every file of its weights. A download may have been killed."""
    if not any((snapshot / config).is_file() for config in CONFIGS):
        return False
    try:
        entries = json.loads((snapshot / INDEX).read_text(encoding="utf-8"))
        shards = set(entries["weight_map"].values())
    except FileNotFoundError:
        # Files are links to blobs: one that leads nowhere is not there.
        return any(path.is_file() for path in snapshot.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(shards) and all((snapshot / str(shard)).is_file() for shard in shards)
