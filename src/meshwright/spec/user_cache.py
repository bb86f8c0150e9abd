"""The user's cache folder, and a lock under which one process at a time fills a part of it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def default_root() -> Path:
    """$XDG_CACHE_HOME/meshwright, by default ~/.cache/meshwright (XDG base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """Let one process at a time make this folder: yields whether the system locks files. Without locks several
    processes may make it, and the last one's stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        locked = False
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        yield locked
