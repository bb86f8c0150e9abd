"""Checkpoints of one or many runs, on disk or behind a URL, without torch."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.interface.answers.answer import Answer, checked
from meshwright.interface.answers.markup import table
from meshwright.remote.locations import Location, is_url, reporting
from meshwright.remote.transfer import THREADS, persist
from meshwright.spec.errors import ArgumentError, CheckpointError, RunError
from meshwright.spec.units import gib, many
from meshwright.store import checkpoint_folder
from meshwright.store.checkpoint_folder import COMMIT, Commit
from meshwright.store.mirror import CHECKPOINTS, StoredRun
from meshwright.store.run_folder import RunLock

HEAD = ("step", "held-out loss", "size", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """One checkpoint of a run."""

    run: str
    name: str
    step: int
    score: float | None
    """Held-out loss. None = not evaluated."""
    size_bytes: int
    problem: str
    """Why it cannot be used. Empty = it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRuns(Answer):
    """Checkpoints of all runs below a place."""

    where: str
    verified: bool
    checkpoints: tuple[ListedCheckpoint, ...]
    removed: tuple[str, ...]
    """Paths or URLs of what was pruned."""

    @property
    def problems(self) -> int:
        """Number of checkpoints that cannot be used."""
        return sum(bool(entry.problem) for entry in self.checkpoints)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of --json."""
        return {"kind": "runs", **asdict(self)}

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per checkpoint."""
        return [asdict(entry) for entry in self.checkpoints]

    def lines(self) -> Iterator[str]:
        """Yield the list as text, one block per run."""
        if not self.checkpoints:
            yield f"{self.where}: no checkpoints"
        for run in dict.fromkeys(entry.run for entry in self.checkpoints):
            entries = [entry for entry in self.checkpoints if entry.run == run]
            size = gib(sum(entry.size_bytes for entry in entries))
            yield f"{run}: {many(len(entries), 'checkpoint')}, {size}"
            cells = [HEAD, *map(self._cells, entries)]
            widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD) - 1)]
            for row in cells:
                columns = (cell.rjust(width) for cell, width in zip(row, widths, strict=False))
                yield f"  {'  '.join(columns)}  {row[-1]}"
        for name in self.removed:
            yield f"removed {name}"

    def _cells(self, entry: ListedCheckpoint) -> tuple[str, str, str, str]:
        loss = "" if entry.score is None else f"{entry.score:.4f}"
        whole = "whole, every byte compared" if self.verified else "whole, by its sizes"
        return f"{entry.step:,}", loss, gib(entry.size_bytes), entry.problem or whole

    def _repr_html_(self) -> str:
        return table(("run", *HEAD), [(entry.run, *self._cells(entry)) for entry in self.checkpoints])


@checked
def runs(where: str | Path = "runs", *, verify: bool = False, prune: int | None = None) -> ListedRuns:
    """List the checkpoints of a run, or of all runs below a folder or a URL.

    Args:
        where: A path, or a URL.
        verify: Read every byte and compare it with the recorded hashes.
        prune: Remove all but the newest N checkpoints of each run, and its best. None = remove nothing.

    Raises:
        RunError: There is no such folder, or a run to be pruned is training now.
        StoreError: The store cannot be reached, read or changed.
    """
    if prune is not None and prune < 1:
        raise ArgumentError("prune", prune, "must be 1 or more", "a run resumes from its newest checkpoint")
    where = str(where)
    names, list_run = (_stored_names, _list_stored) if is_url(where) else (_local_names, _list_local)
    removed: list[str] = []
    checkpoints: list[ListedCheckpoint] = []
    for run in names(where):
        checkpoints += list_run(run, verify, prune, removed)
    return ListedRuns(where=where, checkpoints=tuple(checkpoints), removed=tuple(removed), verified=verify)


def _local_names(where: str) -> list[str]:
    folder = Path(where)
    if not folder.is_dir():
        raise RunError(f"{where} is no folder: give a run, a folder of runs, or a URL as s3://bucket/runs")
    if (folder / CHECKPOINTS).is_dir():
        return [where]
    # `latest` is a link to one of the others.
    return sorted(
        str(path.parent) for path in folder.rglob(CHECKPOINTS) if path.is_dir() and not path.parent.is_symlink()
    )


def _list_local(run: str, verify: bool, prune: int | None, removed: list[str]) -> list[ListedCheckpoint]:
    folder = Path(run) / CHECKPOINTS
    if prune is not None:
        before = checkpoint_folder.list_checkpoints(folder)
        lock = RunLock.take(Path(run))
        try:
            checkpoint_folder.remove_surplus(folder, max((saved.step for saved in before), default=0), prune)
        finally:
            lock.release()
        remaining = {saved.path for saved in checkpoint_folder.list_checkpoints(folder)}
        removed += [str(saved.path) for saved in before if saved.path not in remaining]
    return [
        ListedCheckpoint(
            run=run, name=saved.path.name, step=saved.step, score=saved.score, size_bytes=saved.size_bytes,
            problem=saved.problem or (_local_damage(saved.path) if verify else ""),
        )
        for saved in checkpoint_folder.list_checkpoints(folder)
    ]  # fmt: skip


def _local_damage(path: Path) -> str:
    try:
        checkpoint_folder.check_hashes(path, checkpoint_folder.read_commit(path).files)
    except CheckpointError as error:
        return str(error)
    return ""


def _stored_names(where: str) -> list[str]:
    location = Location.open(where)
    files = [f"{location.url}/{file.name}" for file in persist(location.list_files)]
    return sorted({file.rpartition(f"/{CHECKPOINTS}/")[0] for file in files if file.endswith(f"/{COMMIT}")} - {""})


def _list_stored(run: str, verify: bool, prune: int | None, removed: list[str]) -> list[ListedCheckpoint]:
    stored = StoredRun(Location.open(run))
    if prune is not None:
        removed += [str(stored.checkpoints / name) for name in stored.prune(prune)]
    listed = []
    for entry in stored.list_checkpoints():
        problem = stored.find_problem(entry.name)
        commit = None if problem else stored.read_commit(entry.name)
        if commit is not None and verify:
            problem = _stored_damage(stored.checkpoints / entry.name, commit)
        listed.append(
            ListedCheckpoint(
                run=run, name=entry.name, step=entry.step, score=commit.score if commit else None,
                size_bytes=commit.size_bytes if commit else entry.size_bytes, problem=problem,
            )
        )  # fmt: skip
    return listed


def _stored_damage(folder: Location, commit: Commit) -> str:
    """Read every file of a stored checkpoint, several at once, and return what differs. Nothing goes to disk."""

    def digest(name: str) -> str:
        with reporting(folder.url), (folder / name).open_file() as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(lambda file: persist(lambda: digest(file.name)), commit.files))
    damaged = [file.name for file, sha256 in zip(commit.files, digests, strict=True) if sha256 != file.sha256]
    return f"{damaged[0]} is damaged: its hash differs from the recorded one" if damaged else ""
