"""Cache folders: completed under a temporary name and then renamed, by one process at a time."""

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
"""Called with (bytes of text or rows done, total)."""


def map_numbers(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Return the numbers in a file, read-only."""
    if not count:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` when the block succeeds and is removed when it fails."""
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
    """Let one process at a time create this folder, after removing what killed processes left of it."""
    with user_cache.lock(folder) as locked:
        for leftover in folder.parent.glob(f".{folder.name}.*") if locked else ():
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
        yield


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, or {} if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object to a file that appears complete or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with new.open("wb") as file:
        file.write(json.dumps(content, indent=1).encode())
        sync(file)
    new.replace(path)


def sync(file: BinaryIO) -> None:
    """Flush a file to the disk."""
    file.flush()
    os.fsync(file.fileno())
