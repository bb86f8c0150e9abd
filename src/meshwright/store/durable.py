"""Files that are whole or not there at all, also after a power cut."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.spec.errors import PlanError, RunError


def write_file(path: Path, data: bytes) -> None:
    """Write and fsync; for files inside a folder that is not visible yet. OSError as it comes."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step: whoever reads sees the old file or the new one. OSError as it comes."""
    fresh = path.with_name(f".{path.name}.saving")
    try:
        write_file(fresh, data)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder (not the files' contents) survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_bytes(path: Path) -> int | None:
    """Free in the file system where `path` is, or will be; None where it does not say, as some network ones."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    try:
        return shutil.disk_usage(there).free
    except OSError:
        return None


def refuse_taken(path: Path, named: str) -> None:
    """Refuse a folder to be made that holds something, or is a file: PlanError. `named`: the argument, as `out=`."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "is not empty: take another folder, or empty this one" if path.is_dir() else "is there: name another"
        raise PlanError(f"{named}{path} {what}")


def refuse_unwritable(path: Path, named: str = "run=") -> None:
    """Refuse a folder that no file can be written to, where it is or will be: RunError. A full disk passes. `named`:
    the argument, as `out=`."""
    nearest = path
    try:
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        with tempfile.TemporaryFile(dir=nearest):
            return
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"{named}{path} cannot be written: {nearest}: {error.strerror}; choose another {named.strip()}"
            ) from None


@contextmanager
def one_line(path: Path, another: str = "run=") -> Iterator[None]:
    """What the operating system refuses, as a sentence; `another`: what a user names to have it elsewhere."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{path}: {reason}; fix that, or choose another {another}") from None
