"""Lock of a run folder. The kernel releases it when the process dies, however it dies."""

import errno
import fcntl
import json
import logging
import os
import socket
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from meshwright.spec.errors import RunError

_NAME = ".lock"
_held: set[Path] = set()
_guard = threading.Lock()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunLock:
    """A POSIX record lock that is held. Forked workers do not inherit it, so none of them can outlive it."""

    path: Path
    handle: int

    @classmethod
    def take(cls, folder: Path) -> "RunLock":
        """Lock `folder` for this process. Raises RunError naming the holder, OSError when the folder is read-only."""
        path = (folder / _NAME).resolve()
        with _guard:  # record locks do not exclude their own process, and closing any handle releases them
            if path in _held:
                raise RunError(f"this process already runs in {folder}: choose another run=")
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock(handle, folder)
                _sign(handle)
            except BaseException:
                os.close(handle)
                raise
            _held.add(path)
        return cls(path, handle)

    def release(self) -> None:
        """Release the folder. A second call does nothing."""
        with _guard:
            if self.path in _held:
                _held.discard(self.path)
                os.close(self.handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # a network file system without locks
            log.warning("%s cannot be locked (%s): take care that no second run uses it", folder, error.strerror)
            return
        raise RunError(
            f"another run is going on in {folder} ({_holder(handle)}): choose another run=, or wait until it ends"
        ) from None


def _sign(handle: int) -> None:
    signature = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat("T", "seconds")}
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(signature).encode() + b"\n", 0)


def _holder(handle: int) -> str:
    try:
        signature = json.loads(os.pread(handle, 4096, 0))
        return f"process {signature['pid']} on {signature['host']} since {signature['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it did not sign"
