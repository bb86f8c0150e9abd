"""User's cache folder, and a lock that admits one process at a time to a part of it."""

import atexit
import contextlib
import errno
import functools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_LEFTOVER_S = 86_400.0
"""Age from which a temporary folder is taken for one that a killed process left."""


def default_root() -> Path:
    """Return $XDG_CACHE_HOME/meshwright, by default ~/.cache/meshwright (XDG base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


@functools.cache
def _writable(root: Path) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
        # permissions do not tell of read-only mounts and quotas: only a write does
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return root
        reason = f"{root}: {error.strerror}"
        log.warning("text is encoded at each start: %s; set XDG_CACHE_HOME to a folder with room", reason)
    temporary = tempfile.mkdtemp(prefix="meshwright-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def writable_root() -> Path:
    """Return the user's cache, or a temporary folder of this process if nothing can be written there.

    The log tells which. A full disk does not count: it is reported when something is written.
    """
    return _writable(default_root())


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """Let one process at a time create this folder, and yield whether the system supports locks.

    Without locks several processes may create it, and the last one's result remains.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # the lock is next to the folder, which need not exist yet
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        locked = False
        with contextlib.suppress(ImportError, OSError):
            # Windows has no fcntl
            import fcntl

            # closing the file releases the lock, also when the process dies
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        yield locked


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Give a folder in the user's cache that is removed afterwards, and remove what killed processes left of it."""
    root = writable_root()
    for leftover in root.glob(f"{prefix}-*"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_S:
                shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}-", dir=root) as folder:
        yield Path(folder)
