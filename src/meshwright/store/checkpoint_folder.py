"""The folder of a run's checkpoints: write COMMIT, publish by a rename, find the newest and the best, remove others.

COMMIT is the last file written into a checkpoint. It lists the size and hash of every other file, and its own hash. A
rename then makes the checkpoint visible (`commit`).
"""

import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import CheckpointError, DamagedCheckpoint, RunError, argument
from meshwright.store.durable import link_file, sync_folder, write_file

COMMIT_FORMAT = 1
"""Increased whenever an older version could misread what a newer one writes."""
COMMIT = "COMMIT"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
new_hash = hashlib.sha256
"""SHA-256: 1.1 GB/s per core with processor support (BLAKE2b: 0.4), and it releases the GIL."""
_STEP_NAME = re.compile(r"step-(\d+)")
BEFORE_SPIKE = "before-spike"
"""Folder of a run for the checkpoint from before a loss spike that no rollback was left for."""
MOST_OF_A_RECORD = 2**16
"""Upper bound in bytes of the first metrics record."""
_SAVING, _REMOVING = ".saving-", ".removing-"
FETCHING = ".fetching-"
"""Start of the name of a checkpoint that is downloaded."""
_PARTS = ".parts-"
"""Start of the name of what a machine holds of a checkpoint, where machines share no folder."""
log = logging.getLogger(__name__)


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

    def find_problem(self, sizes: Mapping[str, int]) -> str:
        """Return what is wrong with the files of a folder, by their sizes. Empty = each has its full length."""
        for file in self.files:
            if file.name not in sizes:
                return f"{file.name} is missing"
            if sizes[file.name] != file.size_bytes:
                return f"{file.name} has {sizes[file.name]:,} bytes instead of {file.size_bytes:,}"
        # A shard that COMMIT does not list would be read all the same, since the reader takes all files.
        foreign = {name for name in sizes if name.endswith(".safetensors")} - {file.name for file in self.files}
        return f"{min(foreign)} does not belong to it" if foreign else ""


def record_file(path: Path) -> FileRecord:
    """Hash a file on disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, new_hash).hexdigest()
        return FileRecord(name=path.name, size_bytes=file.tell(), sha256=digest)


def write_commit(folder: Path, commit: Commit) -> None:
    """Write COMMIT durably. Every other file must be on disk already."""
    write_file(folder / COMMIT, encode_commit(commit))


def read_commit(folder: Path) -> Commit:
    """Read COMMIT and check it against its own hash.

    Raises DamagedCheckpoint when it is missing or invalid, CheckpointError for a newer version or without permission.
    """
    try:
        raw = (folder / COMMIT).read_bytes()
    except FileNotFoundError:
        if folder.is_dir():
            raise _report_damage(folder, "it is not committed, its save did not end") from None
        raise CheckpointError(f"checkpoint {folder} does not exist; take another one") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error.strerror}") from None
    return decode_commit(str(folder), raw)


def check_sizes(folder: Path, commit: Commit) -> None:
    """Raise DamagedCheckpoint unless every file exists in full length. Costs one stat call per file."""
    try:
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    except OSError as error:
        raise _report_damage(folder, f"{error.filename or 'it'} cannot be read ({error.strerror})") from None
    if problem := commit.find_problem(sizes):
        raise _report_damage(folder, problem)


def check_hashes(folder: Path, files: Iterable[FileRecord], begun: Callable[[], None] = lambda: None) -> None:
    """Raise DamagedCheckpoint unless every byte matches. Reads the files once, on up to 8 threads.

    `begun` is called by these threads, once per file.
    """
    files = list(files)

    def look(file: FileRecord) -> str:
        begun()
        return find_difference(folder, file)

    with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1, len(files)))) as pool:
        for problem in pool.map(look, files):
            if problem:
                raise _report_damage(folder, problem)


def find_difference(folder: Path, file: FileRecord) -> str:
    """Return what is wrong with a file of a checkpoint. Empty = every byte is as recorded."""
    try:
        same = record_file(folder / file.name) == file
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    return "" if same else f"{file.name} is damaged or tampered with: its hash differs from the one in {COMMIT}"


def _report_damage(folder: Path | str, what: str) -> DamagedCheckpoint:
    """Build the error. The caller, who knows the alternatives, adds the remedy."""
    return DamagedCheckpoint(f"checkpoint {folder}: {what}")


def encode_commit(commit: Commit) -> bytes:
    """Encode canonically, so that `decode_commit` can compare byte for byte."""
    body = {
        "format": COMMIT_FORMAT,
        "step": commit.step,
        "score": commit.score,
        "files": {f.name: {"bytes": f.size_bytes, "sha256": f.sha256} for f in commit.files},
    }
    return _canonical_json({**body, "sha256": new_hash(_canonical_json(body)).hexdigest()})


def decode_commit(folder: str, raw: bytes) -> Commit:
    """Check and decode COMMIT. `folder`: the checkpoint's name in messages. Raises as `read_commit` does."""
    try:
        body = json.loads(raw)
        # A newer format is refused before its hash, which may be computed otherwise.
        version = body["format"]
        if type(version) is int and version > COMMIT_FORMAT:
            raise CheckpointError(
                f"checkpoint {folder} has format {version}, this version reads up to {COMMIT_FORMAT}: update meshwright"
            )
        files = tuple(
            FileRecord(name=name, size_bytes=entry["bytes"], sha256=entry["sha256"])
            for name, entry in body["files"].items()
        )
        commit = Commit(step=body["step"], score=body["score"], files=files)
        # Encoded again, every byte must be the same, the hash included.
        # The hash proves that nothing changed, not that the author is trustworthy: types and names are checked, too.
        sound = (
            encode_commit(commit) == raw
            and type(commit.step) is int
            and (commit.score is None or isinstance(commit.score, float | int))
            and all(type(f.size_bytes) is int and isinstance(f.sha256, str) for f in files)
            and all(_PLAIN_NAME.fullmatch(f.name) for f in files)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise _report_damage(folder, f"{COMMIT} is truncated or damaged")
    return commit


def _canonical_json(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint of a run, in its folder or behind a URL."""

    name: str
    """Name of its folder."""
    step: int
    score: float | None = None
    """Held-out loss; lower is better. None = not evaluated."""
    size_bytes: int = 0
    problem: str = ""
    """Why it cannot be used. Empty = committed, and every file has its full length."""


def check_resume(resume: str) -> None:
    """Raise CheckpointError unless `resume` is auto, no, or the path of a folder."""
    if resume not in ("no", "auto") and not Path(resume).is_dir():
        raise CheckpointError(f"resume={resume} is no checkpoint: give resume=auto, resume=no or a checkpoint's folder")


def refuse_taken(run: Path) -> None:
    """Raise RunError when the folder already holds a run. Cheap enough to call before hours of encoding."""
    saved = list_checkpoints(run / "checkpoints")
    metrics = run / "metrics.jsonl"
    has_record = False
    if metrics.is_file():
        with metrics.open("rb") as file:
            has_record = b"\n" in file.read(MOST_OF_A_RECORD)
    if saved or has_record or (run / "hf").exists():
        last = f" (last checkpoint: step {saved[-1].step})" if saved else ""
        raise RunError(
            f"{run} already holds a run{last}: resume=auto continues it, or choose another {argument('run')}"
        )


def list_checkpoints(folder: Path) -> list[Saved]:
    """List all checkpoints by rising step, broken ones with their problem. Reads COMMIT files and file sizes only."""
    checkpoints = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP_NAME.fullmatch(path.name)
        if match and path.is_dir():
            checkpoints.append(_look(path, int(match[1])))
    return sorted(checkpoints, key=lambda saved: saved.step)


def find_latest(folder: Path) -> Path | None:
    """Return the newest committed checkpoint whose files have their full length. Contents are not read.

    Broken checkpoints are skipped with a logged warning.
    """
    for saved in reversed(list_checkpoints(folder)):
        if not saved.problem:
            return folder / saved.name
        log.warning("passed over: %s", saved.problem)
    return None


def step_of(path: Path) -> int:
    """Return the step of a checkpoint by its folder's name."""
    return int(path.name.rpartition("-")[2])


def list_newest_first(folder: Path) -> list[Path]:
    """List the paths of all checkpoints, damaged or not, newest first."""
    return [folder / saved.name for saved in reversed(list_checkpoints(folder))]


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, complete or not."""
    return (path / COMMIT).is_file() or (_STEP_NAME.fullmatch(path.resolve().name) is not None and path.is_dir())


def find_best(folder: Path) -> Path | None:
    """Return the checkpoint with the lowest score, the earliest among equals. None when none was evaluated."""
    best = best_of([saved for saved in list_checkpoints(folder) if not saved.problem])
    return folder / best.name if best else None


def sweep(folder: Path) -> None:
    """Clean up after a killed process. Only the process that holds the run folder may call this.

    A save killed between COMMIT and the final rename is complete, so it is published. Raises OSError.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.glob(_SAVING + "*")):
        target = folder / path.name.removeprefix(_SAVING)
        if _STEP_NAME.fullmatch(target.name) and not target.exists() and not _look(path, 0).problem:
            path.rename(target)
            sync_folder(folder)
        else:
            _delete(path)
    for path in (*folder.glob(_REMOVING + "*"), *folder.glob(FETCHING + "*")):
        _delete(path)


def paths_of_step(folder: Path, step: int) -> tuple[Path, Path]:
    """Return the temporary and the final path of the checkpoint of a step."""
    name = f"step-{step:06d}"
    return folder / (_SAVING + name), folder / name


def path_of_parts(target: Path) -> Path:
    """Return the path of what this machine holds of a checkpoint. It is hidden, since no reader can use it."""
    return target.with_name(_PARTS + target.name)


def commit(saving: Path, target: Path, contents: Commit) -> None:
    """Write COMMIT and make a checkpoint visible by a rename. Every other file must be on disk already."""
    write_commit(saving, contents)
    sync_folder(saving)
    # An older one of that name is moved aside first. `sweep` repairs a kill between the two renames.
    old = _hide(target) if target.exists() else None
    try:
        saving.rename(target)
    except OSError:
        if old:
            old.rename(target)
        raise
    sync_folder(target.parent)
    if old:
        _delete(old)


def remove_surplus(folder: Path, step: int, keep_last: int, uploading: int | None = None) -> None:
    """Apply retention after saving `step`: keep the newest `keep_last` and the best, remove all others.

    Later steps are removed too: they belong to training that was abandoned by resuming from before them. Broken
    checkpoints remain, since nothing is known about them. A failed removal is logged, not raised.

    `uploading`: step of a checkpoint that is on its way to a store, and remains until the next call.
    """
    sound = [saved for saved in list_checkpoints(folder) if not saved.problem]
    # The best one is kept in addition to the newest, and none of an abandoned future.
    current = [saved for saved in sound if saved.step <= step]
    retained = [*current[-max(1, keep_last) :], best_of(current)]
    _remove(folder / saved.name for saved in sound if saved not in retained and saved.step != uploading)
    # From when machines shared no folder.
    _remove(folder.glob(_PARTS + "*"))


def keep_aside(path: Path, begun: Callable[[], None]) -> Path:
    """Link a checkpoint into BEFORE_SPIKE, where no save removes it, in place of an earlier one. Returns its path.

    `begun` is called before each file: a file system without links copies them. Raises OSError.
    """
    aside = path.parent.with_name(BEFORE_SPIKE)
    fresh, target = aside / f"{_SAVING}{path.name}", aside / path.name
    try:
        for unfinished in aside.glob(f"{_SAVING}*"):
            shutil.rmtree(unfinished)
        fresh.mkdir(parents=True)
        for file in path.iterdir():
            begun()
            link_file(file, fresh / file.name)
        sync_folder(fresh)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
        sync_folder(aside)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    _remove(earlier for earlier in list_newest_first(aside) if earlier != target)
    return target


def remove_older_parts(folder: Path, step: int, uploading: int | None) -> None:
    """Remove what this machine holds of checkpoints but the two newest parts, which make a restart fast.

    The store has all that is whole. `step`: just saved; later ones are of an abandoned course. `uploading`: step of one
    on its way to the store.
    """
    parts = {path: step_of(path) for path in folder.glob(_PARTS + "*")}
    retained = {uploading, *sorted(number for number in parts.values() if number <= step)[-2:]}
    _remove(path for path, number in parts.items() if number not in retained)
    _remove(list_newest_first(folder))


def _remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints. A failed removal is logged."""
    for path in paths:
        try:
            _delete(_hide(path))
        except OSError as error:
            log.warning("%s cannot be removed: %s", path, error.strerror)


def _hide(path: Path) -> Path:
    """Rename a checkpoint out of sight, so that no reader sees it half deleted."""
    return path.rename(path.with_name(f"{_REMOVING}{uuid.uuid4().hex[:8]}-{path.name}"))


def _delete(path: Path) -> None:
    """Delete a hidden folder, or log why it must wait for the next sweep."""
    try:  # on a network file system an open file keeps its folder alive
        shutil.rmtree(path)
    except OSError as error:
        log.warning("%s cannot be deleted yet: %s", path, error.strerror)


def _look(path: Path, step: int) -> Saved:
    try:
        commit = read_commit(path)
        check_sizes(path, commit)
    except CheckpointError as error:
        return Saved(name=path.name, step=step, problem=str(error))
    return Saved(name=path.name, step=commit.step, score=commit.score, size_bytes=commit.size_bytes)


def best_of(checkpoints: Sequence[Saved]) -> Saved | None:
    """Return the checkpoint with the lowest held-out loss, the earliest of equals. None = none was evaluated."""
    scored = [(saved.score, saved.step, saved) for saved in checkpoints if saved.score is not None]
    return min(scored, key=lambda entry: entry[:2])[2] if scored else None
