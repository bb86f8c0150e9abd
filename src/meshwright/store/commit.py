"""COMMIT: the last file written into a checkpoint. It lists the size and hash of every other file, and its own hash.

A rename then makes the checkpoint visible (`checkpoint_folder.publish`).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import CheckpointError, DamagedCheckpoint
from meshwright.store.durable import write_file

FORMAT = 1
"""Increased whenever an older version could misread what a newer one writes."""
NAME = "COMMIT"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Contents of a checkpoint."""

    step: int
    score: float | None
    """Held-out loss; lower is better. None = not evaluated."""
    files: tuple[FileRecord, ...]

    @property
    def size_bytes(self) -> int:
        """Total size of all files but COMMIT."""
        return sum(file.size_bytes for file in self.files)


new_hash = hashlib.sha256
"""SHA-256: 1.1 GB/s per core with processor support (BLAKE2b: 0.4), and it releases the GIL."""


def record(path: Path) -> FileRecord:
    """Hash a file on disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, new_hash).hexdigest()
        return FileRecord(name=path.name, size_bytes=file.tell(), sha256=digest)


def write(folder: Path, commit: Commit) -> None:
    """Write COMMIT durably. Every other file must be on disk already."""
    write_file(folder / NAME, _encode(commit))


def read(folder: Path) -> Commit:
    """Read COMMIT and check it against its own hash.

    Raises DamagedCheckpoint when it is missing or invalid, CheckpointError for a newer version or without permission.
    """
    try:
        raw = (folder / NAME).read_bytes()
    except FileNotFoundError:
        if folder.is_dir():
            raise _report_damage(folder, "it is not committed, its save did not end") from None
        raise CheckpointError(f"checkpoint {folder} does not exist; take another one") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error.strerror}") from None
    return _decode(folder, raw)


def check_sizes(folder: Path, commit: Commit) -> None:
    """Raise DamagedCheckpoint unless every file exists in full length. Costs one stat call per file."""
    for file in commit.files:
        try:
            size = (folder / file.name).stat().st_size
        except OSError as error:
            raise _report_damage(folder, f"{file.name} cannot be read ({error.strerror})") from None
        if size != file.size_bytes:
            raise _report_damage(
                folder, f"{file.name} is truncated or changed: {size} bytes instead of {file.size_bytes}"
            )
    # A shard that COMMIT does not list would be read all the same, since the reader takes all files.
    listed = {file.name for file in commit.files}
    for path in folder.glob("*.safetensors"):
        if path.name not in listed:
            raise _report_damage(folder, f"{path.name} does not belong to it")


def check_hashes(folder: Path, files: Iterable[FileRecord], begun: Callable[[], None] = lambda: None) -> None:
    """Raise DamagedCheckpoint unless every byte matches. Reads the files once, on up to 8 threads.

    `begun` is called by these threads, once per file.
    """
    files = list(files)

    def look(file: FileRecord) -> str:
        begun()
        return _difference(folder, file)

    with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1, len(files)))) as pool:
        for problem in pool.map(look, files):
            if problem:
                raise _report_damage(folder, problem)


def _difference(folder: Path, file: FileRecord) -> str:
    try:
        same = record(folder / file.name) == file
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    return "" if same else f"{file.name} is damaged or tampered with: its hash differs from the one in {NAME}"


def _report_damage(folder: Path, what: str) -> DamagedCheckpoint:
    """Build the error. The caller, who knows the alternatives, adds the remedy."""
    return DamagedCheckpoint(f"checkpoint {folder}: {what}")


def _encode(commit: Commit) -> bytes:
    """Encode canonically, so that `_decode` can compare byte for byte."""
    body = {
        "format": FORMAT,
        "step": commit.step,
        "score": commit.score,
        "files": {f.name: {"bytes": f.size_bytes, "sha256": f.sha256} for f in commit.files},
    }
    return _text({**body, "sha256": new_hash(_text(body)).hexdigest()})


def _decode(folder: Path, raw: bytes) -> Commit:
    try:
        body = json.loads(raw)
        # A newer format is refused before its hash, which may be computed otherwise.
        version = body["format"]
        if type(version) is int and version > FORMAT:
            raise CheckpointError(
                f"checkpoint {folder} has format {version}, this version reads up to {FORMAT}: update meshwright"
            )
        files = tuple(
            FileRecord(name=name, size_bytes=entry["bytes"], sha256=entry["sha256"])
            for name, entry in body["files"].items()
        )
        commit = Commit(step=body["step"], score=body["score"], files=files)
        # Encoded again, every byte must be the same, the hash included.
        # The hash proves that nothing changed, not that the author is trustworthy: types and names are checked, too.
        sound = (
            _encode(commit) == raw
            and type(commit.step) is int
            and (commit.score is None or isinstance(commit.score, float | int))
            and all(type(f.size_bytes) is int and isinstance(f.sha256, str) for f in files)
            and all(_PLAIN_NAME.fullmatch(f.name) for f in files)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise _report_damage(folder, f"{NAME} is truncated or damaged")
    return commit


def _text(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
