"""Checkpoints of one or many runs, on disk or behind a URL, without torch."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.interface.answers.answer import Answer, checked
from meshwright.interface.answers.markup import table
from meshwright.interface.terminal.screen_text import aligned
from meshwright.remote.locations import Location, is_url
from meshwright.spec.errors import ArgumentError, CheckpointError, RunError
from meshwright.spec.units import gib, many
from meshwright.store import checkpoint_folder
from meshwright.store.checkpoint_folder import COMMIT, Saved
from meshwright.store.run_folder import RunLock
from meshwright.store.stored_run import CHECKPOINTS, StoredRun

_NAMED_RUNS = 5
"""Most runs that a refusal names."""
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
    """Checkpoints of all runs below a folder or URL."""

    where: str
    verified: bool
    checkpoints: tuple[ListedCheckpoint, ...]
    removed: tuple[str, ...]
    """Paths or URLs of what was pruned."""
    removed_meanwhile: tuple[str, ...] = ()
    """Paths or URLs of what another process removed while it was read."""

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
            *figures, states = zip(HEAD, *map(self._cells, entries), strict=True)
            for line, state in zip(aligned(list(zip(*figures, strict=True)), left=0), states, strict=True):
                yield f"  {line}  {state}"
        for name in self.removed:
            yield f"removed {name}"
        for name in self.removed_meanwhile:
            yield f"{name} was removed meanwhile, so it is not listed"

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
        prune: Remove all but the newest N checkpoints of the run, and its best. `where` must be one run, not a folder
            above. None = remove nothing.

    Raises:
        RunError: There is no such folder, or a run on disk that is to be pruned is training now.
        StoreError: The store cannot be reached, read or changed.
    """
    if prune is not None and prune < 1:
        raise ArgumentError("prune", prune, "must be 1 or more", "a run resumes from its newest checkpoint")
    where = str(where)
    checkpoints, removed, gone = list[ListedCheckpoint](), list[str](), list[str]()
    names = _stored_names(where) if is_url(where) else _local_names(where)
    itself = Location.open(where).url if is_url(where) else where
    if prune is not None and names and names != [itself]:
        # Whoever names a bucket may not know how many runs it has, and nothing brings a checkpoint back.
        more = f" and {len(names) - _NAMED_RUNS} more" if len(names) > _NAMED_RUNS else ""
        remedy = f"{where} is above {many(len(names), 'run')}, so name one: {', '.join(names[:_NAMED_RUNS])}{more}"
        raise ArgumentError("prune", prune, "removes checkpoints of one run", remedy)
    for run in names:
        if prune is not None:
            removed += _prune(run, prune)
        for saved in _list_run(run):
            problem = saved.problem or (_find_damage(run, saved.name) if verify else "")
            if problem and _is_gone(run, saved.name):
                gone.append(f"{run}/{CHECKPOINTS}/{saved.name}")
            else:
                checkpoints.append(ListedCheckpoint(run=run, **asdict(replace(saved, problem=problem))))
    return ListedRuns(
        where=where, checkpoints=tuple(checkpoints), removed=tuple(removed), removed_meanwhile=tuple(gone),
        verified=verify,
    )  # fmt: skip


def _local_names(where: str) -> list[str]:
    folder = Path(where)
    if not folder.is_dir():
        raise RunError(f"{where} is no folder: give a run, a folder of runs, or a URL as s3://bucket/runs")
    if (folder / CHECKPOINTS).is_dir():
        return [where]
    # os.walk follows no link, as `latest`, and passes over folders that go away beside it. Path.rglob raises there.
    return sorted(str(Path(path)) for path, folders, _ in os.walk(where) if CHECKPOINTS in folders)


def _stored_names(where: str) -> list[str]:
    location = Location.open(where)
    files = [f"{location.url}/{name}" for name in location.list_sizes()]
    if not files:
        raise RunError(f"{location} holds nothing: check the name, and its bucket")
    names = {file.rpartition(f"/{CHECKPOINTS}/")[0] for file in files if file.endswith(f"/{COMMIT}")} - {""}
    return [location.url] if location.url in names else sorted(names)


def _prune(run: str, keep_last: int) -> list[str]:
    if is_url(run):
        stored = StoredRun(Location.open(run))
        return [str(stored.checkpoints / name) for name in stored.prune(keep_last)]
    folder = Path(run) / CHECKPOINTS
    before = checkpoint_folder.list_checkpoints(folder)
    lock = RunLock.take(Path(run))
    try:
        checkpoint_folder.remove_surplus(folder, max((saved.step for saved in before), default=0), keep_last)
    finally:
        lock.release()
    return [str(folder / saved.name) for saved in before if not (folder / saved.name).exists()]


def _list_run(run: str) -> list[Saved]:
    if is_url(run):
        return StoredRun(Location.open(run)).list_checkpoints()
    return checkpoint_folder.list_checkpoints(Path(run) / CHECKPOINTS)


def _find_damage(run: str, name: str) -> str:
    """Return what is wrong with a checkpoint of which every byte is read. Empty = nothing."""
    path = Path(run) / CHECKPOINTS / name
    try:
        if is_url(run):
            StoredRun(Location.open(run)).check_hashes(name)
        else:
            checkpoint_folder.check_hashes(path, checkpoint_folder.read_commit(path).files)
    except CheckpointError as error:
        return str(error)
    except FileNotFoundError:
        return "a file is missing"
    return ""


def _is_gone(run: str, name: str) -> bool:
    """Return whether a checkpoint that was listed is no longer there. Its folder, or its COMMIT, is removed first."""
    if is_url(run):
        return (Location.open(run) / CHECKPOINTS / name / COMMIT).describe() is None
    return not (Path(run) / CHECKPOINTS / name).is_dir()
