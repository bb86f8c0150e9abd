"""Durable file writes: complete or absent, even after a power cut. Checks that a folder can be written."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.spec.errors import PlanError, RunError, StoreError, argument
from meshwright.spec.units import gib

RUN = argument("run")
"""The argument that most paths come from."""
NODE_DISKS = frozenset({"btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""File systems of one machine."""


def write_file(path: Path, data: bytes) -> None:
    """Write and fsync a file in a folder that is not visible yet. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old contents or the new. Raises OSError."""
    fresh = path.with_name(f".{path.name}.saving")
    try:
        write_file(fresh, data)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    # Without this a power cut could still undo the rename.
    sync_folder(path.parent)


def link_file(source: Path, target: Path) -> None:
    """Make a second name for a file that nobody changes, or a copy on a file system without links. Raises OSError."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def sync_folder(path: Path) -> None:
    """Fsync a folder, so that its file names (not their contents) survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def free_bytes(path: Path) -> int | None:
    """Return the free bytes of the file system of `path`, which need not exist yet. None when it reports none."""
    try:
        return shutil.disk_usage(nearest_existing(path)).free
    except OSError:
        return None


def file_system(path: Path) -> str:
    """Return the type of the file system of a path, which need not exist. Empty = unknown here."""
    mounts = Path("/proc/mounts")
    lines = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()] if mounts.exists() else []
    holding = [
        (len(point), number, kind) for number, (_, point, kind, *_) in enumerate(lines) if path.is_relative_to(point)
    ]
    # Of equal mount points the last hides those before it.
    return max(holding)[2] if holding else ""


def check_room(folder: Path, needed_bytes: int, what: object) -> None:
    """Raise StoreError when the disk of a folder has too little room for a copy of something behind a URL."""
    free = free_bytes(folder)
    if free is not None and free < needed_bytes:
        raise StoreError(
            f"a copy of {what} takes {gib(needed_bytes)}, and the disk of {folder} has {gib(free)} free: free some "
            f"space, or choose a larger disk ({RUN}, XDG_CACHE_HOME)"
        )


def refuse_nonempty(path: Path, key: str) -> None:
    """Raise PlanError when an output folder is a file or not empty. `key`: the argument."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "is not empty: take another folder, or empty this one" if path.is_dir() else "is there: name another"
        raise PlanError(f"{argument(key, path)} {what}")


def refuse_unwritable(path: Path, key: str = "run") -> None:
    """Raise RunError when no file can be created in a folder, or in its nearest existing parent. A full disk passes.

    `key`: the argument that named the folder.
    """
    nearest = path
    try:
        nearest = nearest_existing(path)
        with tempfile.TemporaryFile(dir=nearest):
            return
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"{argument(key, path)} cannot be written: {nearest}: {error.strerror}; choose another {argument(key)}"
            ) from None


@contextmanager
def report_in_one_line(path: Path, another: str = RUN) -> Iterator[None]:
    """Turn an OSError into a one-line RunError. `another`: name of what chooses another path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{path}: {reason}; fix that, or choose another {another}") from None
