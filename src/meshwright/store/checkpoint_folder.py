"""The folder of a run's checkpoints: publish one by a rename, find the newest and the best, remove others."""

import logging
import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec.errors import CheckpointError, RunError, argument
from meshwright.store import commit as commits
from meshwright.store.durable import sync_folder

_NAME = re.compile(r"step-(\d+)")
MOST_OF_A_RECORD = 2**16
"""Upper bound in bytes of the first metrics record."""
_SAVING, _REMOVING = ".saving-", ".removing-"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint in a run's folder."""

    path: Path
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
    """Raise RunError when the folder already holds a run. Cheap: reads little more than file names."""
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
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            checkpoints.append(_look(path, int(match[1])))
    return sorted(checkpoints, key=lambda saved: saved.step)


def find_latest(folder: Path) -> Path | None:
    """Return the newest committed checkpoint whose files have their full length. Contents are not read.

    Broken checkpoints are skipped with a logged warning.
    """
    for saved in reversed(list_checkpoints(folder)):
        if not saved.problem:
            return saved.path
        log.warning("passed over: %s", saved.problem)
    return None


def list_newest_first(folder: Path) -> list[Path]:
    """List the paths of all checkpoints, damaged or not, newest first."""
    return [saved.path for saved in reversed(list_checkpoints(folder))]


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, complete or not."""
    return (path / commits.NAME).is_file() or (_NAME.fullmatch(path.resolve().name) is not None and path.is_dir())


def find_best(folder: Path) -> Path | None:
    """Return the checkpoint with the lowest score, the earliest among equals. None when none was evaluated."""
    lowest = _best([saved for saved in list_checkpoints(folder) if not saved.problem])
    return lowest.path if lowest else None


def sweep(folder: Path) -> None:
    """Clean up after a killed process. Only the process that holds the run folder may call this.

    A save killed between COMMIT and the final rename is complete, so it is published. Raises OSError.
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


def paths_of_step(folder: Path, step: int) -> tuple[Path, Path]:
    """Return the temporary and the final path of the checkpoint of a step."""
    name = f"step-{step:06d}"
    return folder / (_SAVING + name), folder / name


def publish(saving: Path, target: Path) -> None:
    """Make a complete checkpoint visible: rename it to its final path."""
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


def remove_surplus(folder: Path, step: int, keep_last: int) -> None:
    """Apply retention after saving `step`: keep the newest `keep_last` and the best, remove all others.

    Later steps are removed too: they belong to training that was abandoned by resuming from before them. Broken
    checkpoints remain, since nothing is known about them. A failed removal is logged, not raised.
    """
    sound = [saved for saved in list_checkpoints(folder) if not saved.problem]
    # The best one is kept beside the newest, and none of an abandoned future.
    current = [saved for saved in sound if saved.step <= step]
    retained = [*current[-max(1, keep_last) :], _best(current)]
    for saved in sound:
        if saved not in retained:
            try:
                _delete(_hide(saved.path))
            except OSError as error:
                log.warning("%s cannot be removed: %s", saved.path, error.strerror)


def discard(path: Path) -> None:
    """Delete a checkpoint that was never published."""
    shutil.rmtree(path, ignore_errors=True)


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
        commit = commits.read(path)
        commits.check_sizes(path, commit)
    except CheckpointError as error:
        return Saved(path=path, step=step, problem=str(error))
    return Saved(path=path, step=commit.step, score=commit.score, size_bytes=commit.size_bytes)


def _best(checkpoints: Sequence[Saved]) -> Saved | None:
    scored = [(saved.score, saved.step, saved) for saved in checkpoints if saved.score is not None]
    return min(scored, key=lambda entry: entry[:2])[2] if scored else None
