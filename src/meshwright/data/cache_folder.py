"""Cache folders: made whole under another name and moved to their place, by one process at a time."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import user_cache

Progress = Callable[[int, int], None]
"""(bytes of text, or rows, done; how many in all)."""


def mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """The numbers in a file, read-only."""
    if not count:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder under a temporary name that takes its place when the block ends well and is gone when it does not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    old = new.with_name(new.name + ".old")
    try:
        yield new
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first, with the same content
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Let one process at a time make this folder, without what killed processes left of it."""
    with user_cache.lock(folder) as locked:
        if locked:
            _sweep(folder)
        yield


def _sweep(folder: Path) -> None:
    """Remove what killed processes left of this folder; only who holds the lock may."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, {} where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """The object as a file that is there whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with new.open("wb") as file:
        file.write(json.dumps(content, indent=1).encode())
        sync(file)
    new.replace(path)


def sync(file: BinaryIO) -> None:
    """Have what was written on the disk."""
    file.flush()
    os.fsync(file.fileno())
