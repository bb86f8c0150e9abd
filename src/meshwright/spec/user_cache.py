"""The user's cache folder, and a lock under which one process at a time fills a part of it."""

import atexit
import contextlib
import errno
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)


def default_root() -> Path:
    """$XDG_CACHE_HOME/meshwright, by default ~/.cache/meshwright (XDG base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


@functools.cache
def _writable(root: Path) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
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
    """The user's cache, or a folder that this process removes at its end where nothing can be written there. The log
    says which. A full disk is no such case: whoever writes says so."""
    return _writable(default_root())


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
