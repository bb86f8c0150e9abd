"""Paths that are read as token stores: prepared ones, and raw shards. Light, since every run asks."""

from pathlib import Path
from typing import Final

from meshwright.spec.plan.plan import STDLIB, URL

PACKED: Final = (".gz", ".zst", ".zstd")
SHARDS: Final = (".mds", ".tar")
NOT_READ: Final = (".mds.br", ".mds.bz2", ".mds.snappy", ".tar.gz", ".tgz")
MAGIC: Final = frozenset("*?[")
_BESIDE: Final = {"index.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
"""Files that lie beside shards and are no text."""


def ends(name: str) -> tuple[str, str]:
    """Return the ending of a file's name and of its compression: (`.jsonl`, `.gz`)."""
    path = Path(name.lower())
    packed = path.suffix if path.suffix in PACKED else ""
    return (Path(path.stem).suffix if packed else path.suffix), packed


def is_shard(name: str) -> bool:
    """Return whether a file is compressed, or a shard of another trainer."""
    kind, packed = ends(name)
    return kind in SHARDS or bool(packed) or name.lower().endswith(NOT_READ)


def is_raw(path: str) -> bool:
    """Return whether text is behind a URL, compressed, or in shards: a file, a pattern, or a folder of nothing else."""
    if URL.match(path) or is_shard(path):
        return True
    folder = Path(path).expanduser()
    if path == STDLIB or not folder.is_dir():
        return False
    names = [file.name for file in folder.iterdir() if not file.name.startswith(".") and file.name not in _BESIDE]
    return bool(names) and all(map(is_shard, names))


def is_store(path: str) -> bool:
    """Return whether a path or URL is a token store, finished or not."""
    if not URL.match(path):
        return path != STDLIB and (Path(path).expanduser() / "store.json").is_file()
    from meshwright.remote.locations import Location
    from meshwright.remote.transfer import persist

    is_pattern = bool(MAGIC & set(path)) or is_shard(path) or ends(path)[0] in (".jsonl", ".parquet")
    return not is_pattern and persist((Location.open(path) / "store.json").describe) is not None


def is_stored(path: str) -> bool:
    """Return whether a path is read as a token store: one that was prepared, or raw shards that will be."""
    return is_raw(path) or is_store(path)
