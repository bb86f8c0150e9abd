"""A run behind a URL: its checkpoints and records, which run it belongs to, and what to resume from it.

    URL/run-id                                                  random name of the run that the store belongs to
    URL/.owner                                                  the process that trains it now (owner.py)
    URL/plan.yaml, tokenizer.json, metrics.jsonl ...            files of the run folder
    URL/checkpoints/step-000060-5f0c9e21/shard-..., state.json
    URL/checkpoints/step-000060-5f0c9e21/COMMIT                 last: before it, the checkpoint does not exist

A checkpoint is uploaded into a folder of its own (mirror.py), so that files of a killed attempt, or of an abandoned
course of training, never mix with new ones.
"""

import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.remote.locations import Location
from meshwright.remote.transfer import THREADS, download, remove_parts
from meshwright.spec.errors import CheckpointError, DamagedCheckpoint, StoreError, argument
from meshwright.spec.plan.plan import Store
from meshwright.store import checkpoint_folder
from meshwright.store.checkpoint_folder import COMMIT, Commit, Saved
from meshwright.store.durable import check_room, link_file, replace_file

CHECKPOINTS = "checkpoints"
RUN_ID = "run-id"
"""File of a run folder and of its store: two runs never mix in one store."""
_NAME = re.compile(r"step-(\d+)-[0-9a-f]{8}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run behind a URL, for reading and for removing what is too old."""

    location: Location

    @property
    def checkpoints(self) -> Location:
        """Folder of all checkpoints."""
        return self.location / CHECKPOINTS

    def list_checkpoints(self) -> list[Saved]:
        """List committed checkpoints by rising step, those of one step by name. Broken ones have a problem.

        One listing, and the COMMIT of each. Contents of other files are not read.
        """
        return self._list()[0]

    def _list(self) -> tuple[list[Saved], list[str]]:
        """Return committed checkpoints, and the names of uploads without COMMIT."""
        sizes: dict[str, dict[str, int]] = {}
        for path, size_bytes in self.checkpoints.list_sizes().items():
            folder, _, name = path.partition("/")
            sizes.setdefault(folder, {})[name] = size_bytes
        committed = [name for name in sizes if _NAME.fullmatch(name) and COMMIT in sizes[name]]
        with ThreadPoolExecutor(THREADS) as pool:
            checkpoints = list(pool.map(lambda name: self._examine(name, sizes[name]), committed))
        unfinished = [name for name in sizes if COMMIT not in sizes[name]]
        return sorted(checkpoints, key=lambda saved: (saved.step, saved.name)), unfinished

    def _examine(self, name: str, sizes: Mapping[str, int]) -> Saved:
        step, size_bytes = int(name.split("-")[1]), sum(sizes.values())
        try:
            commit = self.read_commit(name)
        except CheckpointError as error:
            return Saved(name=name, step=step, size_bytes=size_bytes, problem=str(error))
        if problem := commit.find_problem(sizes):
            return Saved(name=name, step=step, size_bytes=size_bytes, problem=problem)
        return Saved(name=name, step=step, score=commit.score, size_bytes=commit.size_bytes)

    def read_commit(self, name: str) -> Commit:
        """Read COMMIT of a checkpoint. Raises DamagedCheckpoint, CheckpointError for a newer version, StoreError."""
        folder = self.checkpoints / name
        try:
            content = (folder / COMMIT).read()
        except FileNotFoundError:
            raise DamagedCheckpoint(f"checkpoint {folder}: it has no {COMMIT}, its upload did not end") from None
        return checkpoint_folder.decode_commit(str(folder), content)

    def check_hashes(self, name: str) -> None:
        """Raise DamagedCheckpoint unless every byte matches. Reads the files once, several at a time."""
        folder, commit = self.checkpoints / name, self.read_commit(name)
        with ThreadPoolExecutor(THREADS) as pool:
            hashes = list(pool.map(lambda file: (folder / file.name).hash(), commit.files))
        for file, sha256 in zip(commit.files, hashes, strict=True):
            if sha256 != file.sha256:
                raise DamagedCheckpoint(f"checkpoint {folder}: {file.name} is damaged: its hash differs from {COMMIT}")

    def newest_first(self) -> Iterator[Saved]:
        """Yield checkpoints whose files have their sizes. Others are logged."""
        for saved in reversed(self.list_checkpoints()):
            if saved.problem:
                log.warning("passed over: checkpoint %s: %s", self.checkpoints / saved.name, saved.problem)
            else:
                yield saved

    def find_replacements(self, path: Path, older: Path | None) -> list[str]:
        """Return the names of sound checkpoints that may replace a damaged local one, the newest first.

        They are its copies, and what is newer than the next local one, `older`. Where the COMMIT of the damaged one is
        readable, that of a copy is the same: another course of training may have saved the same step.
        """
        local = None
        with suppress(CheckpointError):
            local = checkpoint_folder.read_commit(path)
        step, older_step = (checkpoint_folder.step_of(folder) if folder else -1 for folder in (path, older))
        sound = [saved for saved in reversed(self.list_checkpoints()) if not saved.problem]
        return [
            saved.name
            for saved in sound
            if older_step < saved.step < step or (saved.step == step and local in (None, self.read_commit(saved.name)))
        ]

    def remove(self, name: str) -> None:
        """Remove a checkpoint. COMMIT goes first, so that no reader takes what is left for a whole one."""
        folder = self.checkpoints / name
        names = set(folder.list_sizes())
        (folder / COMMIT).remove()
        folder.remove_all(sorted(names - {COMMIT}))

    def prune(self, keep_last: int, *, step: int | None = None, uploading: str = "") -> list[str]:
        """Remove all but the newest `keep_last` whole checkpoints and the best. Damaged newer ones remain.

        Returns the names of what was removed.

        Args:
            keep_last: Number of steps, at least 1.
            step: Step of the run that owns the store. Others of this step, later ones and unfinished uploads are
                removed, too. None = the caller does not own it, so an unfinished upload may be one under way.
            uploading: Name of that step's checkpoint. Empty = all of that step remain.
        """
        checkpoints, unfinished = self._list()
        current = [saved for saved in checkpoints if step is None or saved.step <= step]
        # A step may be there twice: that of an abandoned course goes, too.
        current = [saved for saved in current if saved.step != step or uploading in ("", saved.name)]
        sound = [saved for saved in current if not saved.problem]
        steps = sorted({saved.step for saved in sound})
        oldest_step = steps[-keep_last] if len(steps) >= keep_last else 0
        best = checkpoint_folder.best_of(sound)
        retained = [saved for saved in current if saved.step >= oldest_step or saved is best]
        surplus = [saved.name for saved in checkpoints if saved not in retained]
        surplus += unfinished if step is not None else []
        removed = [name for name in surplus if name != uploading]
        for name in removed:
            self.remove(name)
        if step is not None:
            try:
                self.location.drop_unfinished_uploads()
            except StoreError as error:  # a right that not everybody has, and that uploads do not need
                log.debug("unfinished uploads remain: %s", error)
        return removed

    def fetch_records(self, run: Path) -> None:
        """Download the files of the run folder: plan, tokenizer, metrics. They replace what is there."""
        names = [name for name in self.location.list_sizes() if "/" not in name and not name.startswith(".")]
        download([(self.location / name, run / name, "") for name in names])

    def fetch(
        self, name: str, checkpoints: Path, part: tuple[int, int] = (0, 1), begun: Callable[[], None] = lambda: None
    ) -> Path:
        """Download every n-th file of a checkpoint that is missing or damaged. `part`: (index, n).

        Returns the hidden folder that `publish` makes visible once all parts are there. `begun` is called after each
        piece. Raises StoreError, DamagedCheckpoint.
        """
        commit, hidden = self.read_commit(name), checkpoints / f"{checkpoint_folder.FETCHING}{name}"
        hidden.mkdir(parents=True, exist_ok=True)
        _, whole = checkpoint_folder.paths_of_step(checkpoints, commit.step)
        holders = whole, checkpoint_folder.path_of_parts(whole)
        index, parts = part
        missing = []
        for file in commit.files[index::parts]:
            begun()
            if not checkpoint_folder.find_difference(hidden, file):
                continue
            intact = (path for path in holders if not checkpoint_folder.find_difference(path, file))
            if (holder := next(intact, None)) is None:
                missing.append(file)
            else:
                (hidden / file.name).unlink(missing_ok=True)
                link_file(holder / file.name, hidden / file.name)
        # Ranks may share the disk.
        check_room(hidden, parts * sum(file.size_bytes for file in missing), self.checkpoints / name)
        download([(self.checkpoints / name / file.name, hidden / file.name, file.sha256) for file in missing], begun)
        return hidden

    def publish(self, name: str, hidden: Path) -> Path:
        """Write COMMIT into a downloaded checkpoint and make it visible. Returns its path."""
        commit = self.read_commit(name)
        remove_parts(hidden, 0.0)
        checkpoint_folder.check_sizes(hidden, commit)
        _, target = checkpoint_folder.paths_of_step(hidden.parent, commit.step)
        checkpoint_folder.commit(hidden, target, commit)
        # launch.sh asks what a run has saved since it started.
        with suppress(OSError):
            os.utime(target, (0, 0))
        return target

    def read_id(self) -> str:
        """Return the random id of the run that the store belongs to. Empty = the store is new."""
        try:
            return (self.location / RUN_ID).read().decode(errors="replace")
        except FileNotFoundError:
            return ""


def read_local_id(folder: Path) -> str:
    """Return the id of a folder's run. Empty = it has none."""
    return path.read_text(encoding="utf-8") if (path := folder / RUN_ID).is_file() else ""


def check_store(store: Store, resume: str, folder: Path) -> int | None:
    """Return the step of the newest checkpoint in the store. None = it has none. Raises PlanError, StoreError.

    Refused are a store that cannot be written, and one of another run than that of `folder`. With resume=no: one with
    checkpoints. With resume=auto: one whose newest does not fit on disk. With a path: one with later steps.
    """
    run = StoredRun(Location.open(store.url))
    run.location.refuse_unwritable("store.url")
    newest_step = max((saved.step for saved in run.list_checkpoints()), default=None)
    if newest_step is not None and resume == "no":
        raise StoreError(
            f"{argument('store.url', store.url)} already holds a run (last checkpoint: step {newest_step}): "
            f"resume=auto continues it, or choose another {argument('store.url')}"
        )
    if newest_step is not None and resume != "auto":
        step = checkpoint_folder.read_commit(Path(resume)).step
        # Until the first new checkpoint is there, resume=auto would go on with the course that is abandoned here.
        if newest_step > step:
            raise StoreError(
                f"{argument('store.url', store.url)} has checkpoints up to step {newest_step}, and the run goes "
                f"back to step {step}: choose another {argument('store.url')}"
            )
    _check_run(run, resume, folder)
    if resume == "auto":
        # Before hours of encoding: this checks the room for what is to be fetched.
        choose_newer(run, folder)
    return newest_step


def _check_run(run: StoredRun, resume: str, folder: Path) -> str:
    """Return the id of the run that the store belongs to, empty when it is new. Raises StoreError for another run."""
    stored_id, local_id = run.read_id(), read_local_id(folder)
    # A wiped disk: the run goes on from its store.
    is_new = resume == "auto" and not local_id and not checkpoint_folder.list_checkpoints(folder / CHECKPOINTS)
    if stored_id and local_id != stored_id and not is_new:
        raise StoreError(
            f"{argument('store.url', run.location.url)} belongs to another run than {argument('run', folder)}: "
            f"resume=auto in a new {argument('run')} continues it, or choose another {argument('store.url')}"
        )
    return stored_id


def write_run_id(store: Store, resume: str, folder: Path) -> None:
    """Give a run folder and its store the same id, a random one where they are new. Raises StoreError."""
    run, path = StoredRun(Location.open(store.url)), folder / RUN_ID
    stored_id = _check_run(run, resume, folder)
    if not path.exists():
        replace_file(path, (stored_id or secrets.token_hex(16)).encode())
    if not stored_id:
        (run.location / RUN_ID).write(path.read_bytes())


def choose_newer(run: StoredRun, folder: Path, damaged: Collection[str] = (), *, everywhere: bool = False) -> str:
    """Return the name of the newest sound checkpoint in the store. Empty = local disk is as new, or newer.

    `folder`: the run's folder. `damaged`: names that turned out to be damaged. `everywhere`: other machines need it,
    whatever this one has. Raises StoreError when the disk of the folder has too little room, DamagedCheckpoint when
    nothing but damaged checkpoints is there.
    """
    local = [] if everywhere else checkpoint_folder.list_checkpoints(folder / CHECKPOINTS)
    newest_step = max((saved.step for saved in local if not saved.problem), default=None)
    for saved in run.newest_first():
        if newest_step is not None and saved.step <= newest_step:
            break
        if saved.name not in damaged:
            if not everywhere:  # each machine looks for itself how much is missing
                check_room(folder, saved.size_bytes, run.checkpoints / saved.name)
            return saved.name
    if damaged and newest_step is None:
        raise DamagedCheckpoint(
            f"no checkpoint of {run.location} can be used: see `meshwright runs {run.location} --verify`"
        )
    return ""
