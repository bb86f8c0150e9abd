"""The folder of a run's checkpoints: which there are, which is the newest and the best, which are kept."""

import logging
import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec.errors import CheckpointError, RunError
from meshwright.store import commit as commits
from meshwright.store.durable import sync_folder

_NAME = re.compile(r"step-(\d+)")
MOST_OF_A_RECORD = 2**16
"""Bytes in which the first record of metrics ends."""
_SAVING, _REMOVING = ".saving-", ".removing-"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint of a folder."""

    path: Path
    step: int
    score: float | None = None
    """The lower the better; None = not evaluated."""
    size_bytes: int = 0
    problem: str = ""
    """Why it cannot be used; empty = committed, and every file has its full length."""


def require(resume: str) -> None:
    """Refuse a checkpoint to go on from that is no folder: CheckpointError. `resume`: auto, no, or its path."""
    if resume not in ("no", "auto") and not Path(resume).is_dir():
        raise CheckpointError(f"resume={resume} is no checkpoint: give resume=auto, resume=no or a checkpoint's folder")


def refuse_taken(run: Path) -> None:
    """Refuse a folder that already holds a run: RunError. Reads hardly more than names, so that it can come first."""
    saved = listing(run / "checkpoints")
    if saved or (run / "hf").exists() or _holds_a_record(run / "metrics.jsonl"):
        last = f" (last checkpoint: step {saved[-1].step})" if saved else ""
        raise RunError(f"{run} already holds a run{last}: resume=auto continues it, or choose another run=")


def _holds_a_record(metrics: Path) -> bool:
    if not metrics.is_file():
        return False
    with metrics.open("rb") as file:
        return b"\n" in file.read(MOST_OF_A_RECORD)


def listing(folder: Path) -> list[Saved]:
    """All checkpoints of a folder by rising step, the broken ones with their problem. Reads COMMITs and file sizes."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(_look(path, int(match[1])))
    return sorted(found, key=lambda saved: saved.step)


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that is committed, with every file in its length (no byte is read); a broken one is passed
    over with a warning in the log."""
    for saved in reversed(listing(folder)):
        if not saved.problem:
            return saved.path
        log.warning("passed over: %s", saved.problem)
    return None


def newest_first(folder: Path) -> list[Path]:
    """All checkpoints of a folder, damaged or not."""
    return [saved.path for saved in reversed(listing(folder))]


def is_one(path: Path) -> bool:
    """Whether a folder is a checkpoint, or was to become one."""
    return (path / commits.NAME).is_file() or (_NAME.fullmatch(path.resolve().name) is not None and path.is_dir())


def best(folder: Path) -> Path | None:
    """The checkpoint of the lowest score, the earliest of equals; None where none was evaluated."""
    found = _best([saved for saved in listing(folder) if not saved.problem])
    return found.path if found else None


def sweep(folder: Path) -> None:
    """Clear what a killed process left behind; only for the process that owns the run folder.

    A save that was killed between its COMMIT and its last rename is complete: it is brought to an end. OSError.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.glob(_SAVING + "*")):
        target = folder / path.name.removeprefix(_SAVING)
        if _NAME.fullmatch(target.name) and not target.exists() and not _look(path, 0).problem:
            path.rename(target)
            sync_folder(folder)
        else:
            _delete(path)
    for path in folder.glob(_REMOVING + "*"):
        _delete(path)


def place_for(folder: Path, step: int) -> tuple[Path, Path]:
    """Where the checkpoint of a step is written, and where it then appears."""
    name = f"step-{step:06d}"
    return folder / (_SAVING + name), folder / name


def publish(saving: Path, target: Path) -> None:
    """Rename a complete checkpoint into place. One of the same name steps aside first; `sweep` mends a kill between."""
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


def keep(folder: Path, step: int, keep_last: int) -> None:
    """After saving `step`: keep the newest `keep_last` and the best, remove the others and those of later steps.

    Later steps belong to a course of training given up by resuming from before them. Broken checkpoints stay: nothing
    is known about them. What cannot be removed stays with a warning, since the new checkpoint stands.
    """
    sound = [saved for saved in listing(folder) if not saved.problem]
    current = [saved for saved in sound if saved.step <= step]
    kept = [*current[-max(1, keep_last) :], _best(current)]
    for saved in sound:
        if saved not in kept:
            try:
                _delete(_hide(saved.path))
            except OSError as error:
                log.warning("%s cannot be removed: %s", saved.path, error.strerror)


def discard(path: Path) -> None:
    """Delete a checkpoint that was never published."""
    shutil.rmtree(path, ignore_errors=True)


def _hide(path: Path) -> Path:
    """Out of the way in one step, so that nobody meets it half deleted."""
    return path.rename(path.with_name(f"{_REMOVING}{uuid.uuid4().hex[:8]}-{path.name}"))


def _delete(path: Path) -> None:
    """A hidden folder; on network file systems a file that somebody still reads holds it until the next sweep."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("%s cannot be deleted yet: %s", path, error.strerror)


def _look(path: Path, step: int) -> Saved:
    try:
        commit = commits.read(path)
        commits.check_sizes(path, commit)
    except CheckpointError as error:
        return Saved(path=path, step=step, problem=str(error))
    return Saved(path=path, step=commit.step, score=commit.score, size_bytes=commit.size_bytes)


def _best(found: Sequence[Saved]) -> Saved | None:
    scored = [(saved.score, saved.step, saved) for saved in found if saved.score is not None]
    return min(scored, key=lambda entry: entry[:2])[2] if scored else None
