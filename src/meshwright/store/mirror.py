"""A run's second tier: its checkpoints and records behind a URL, written after the local ones.

    URL/plan.yaml, tokenizer.json, metrics.jsonl ...            files of the run folder
    URL/checkpoints/step-000060-5f0c9e21/shard-..., state.json
    URL/checkpoints/step-000060-5f0c9e21/COMMIT                 last: before it, the checkpoint does not exist

Each rank uploads the files that it wrote. Rank 0 waits until the store lists all of them, then uploads COMMIT: ranks
need no exchange, and one that dies leaves nothing that looks like a checkpoint. Every upload has a folder of its own,
so that files of a killed attempt, or of an abandoned course of training, never mix with new ones.
"""

import json
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread

from meshwright.remote.locations import Location
from meshwright.remote.transfer import Throttle, download, hash_file, persist, upload
from meshwright.spec.errors import (
    CheckpointError,
    DamagedCheckpoint,
    RunError,
    StoreError,
    argument,
)
from meshwright.spec.plan.plan import Store
from meshwright.spec.units import gib, many
from meshwright.store import checkpoint_folder
from meshwright.store.checkpoint_folder import COMMIT, Commit
from meshwright.store.durable import free_bytes, sync_folder, write_file

CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step-(\d+)-[0-9a-f]{8}")
_FAILED = "failed-"
"""Start of the name of a file in place of those of a rank that could not upload them."""
POLL_S = (0.2, 5.0)
"""First and longest pause of rank 0 between two looks for the files of other ranks."""
LONGEST_WAIT_S = 1800.0
"""Longest wait without a new file of another rank."""
SERVE = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from meshwright.store.mirror import serve_uploads
serve_uploads(*sys.argv[1:])
"""
"""Program of the process beside a rank. It has the same package as here, whatever the current folder holds."""
NOT_MIRRORED = (".lock", "loss.png")
"""Files of a run folder that stay on their machine: a lock has no meaning elsewhere, a picture is drawn again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One committed checkpoint in the store."""

    step: int
    name: str
    size_bytes: int
    """Size of all its files, by the listing. COMMIT has the sizes that they should have."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run behind a URL, for reading and for removing what is too old."""

    location: Location

    @property
    def checkpoints(self) -> Location:
        """Folder of all checkpoints."""
        return self.location / CHECKPOINTS

    def list_checkpoints(self) -> list[Stored]:
        """List committed checkpoints by rising step. Of several with one step, the last by name order counts."""
        committed, _ = self._sizes()
        return [Stored(step=step, name=name, size_bytes=size) for step, name, size in sorted(committed)]

    def _sizes(self) -> tuple[list[tuple[int, str, int]], list[str]]:
        """Return (step, name, bytes) of committed checkpoints, and the names of all others."""
        sizes: dict[str, int] = {}
        whole = set()
        for file in persist(self.checkpoints.list_files):
            folder, _, name = file.name.partition("/")
            sizes[folder] = sizes.get(folder, 0) + file.size_bytes
            if name == COMMIT:
                whole.add(folder)
        steps = {name: _NAME.fullmatch(name) for name in sizes}
        committed = [(int(match[1]), name, sizes[name]) for name, match in steps.items() if match and name in whole]
        return committed, [name for name in sizes if name not in whole]

    def read_commit(self, name: str) -> Commit:
        """Read COMMIT of a checkpoint. Raises DamagedCheckpoint, CheckpointError for a newer version, StoreError."""
        folder = self.checkpoints / name
        try:
            raw = persist((folder / COMMIT).read)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"checkpoint {folder}: it has no {COMMIT}, its upload did not end") from None
        return checkpoint_folder.decode_commit(str(folder), raw)

    def find_problem(self, name: str) -> str:
        """Return what is wrong with a checkpoint by its listing. Empty = every file has its size."""
        try:
            commit = self.read_commit(name)
        except CheckpointError as error:
            return str(error)
        sizes = {file.name: file.size_bytes for file in persist((self.checkpoints / name).list_files)}
        for file in commit.files:
            if file.name not in sizes:
                return f"{file.name} is missing"
            if sizes[file.name] != file.size_bytes:
                return f"{file.name} has {sizes[file.name]:,} bytes instead of {file.size_bytes:,}"
        return ""

    def remove(self, name: str) -> None:
        """Remove a checkpoint. COMMIT goes first, so that no reader takes what is left for a whole one."""
        folder = self.checkpoints / name
        files = [file.name for file in persist(folder.list_files)]
        for file in sorted(files, key=lambda file: file != COMMIT):
            persist((folder / file).remove)

    def prune(self, keep_last: int, *, step: int | None = None, uploading: str = "") -> list[str]:
        """Remove all but the newest `keep_last` whole checkpoints and the best. Damaged newer ones remain.

        Returns the names of what was removed.

        Args:
            keep_last: Number of steps.
            step: Step of the run that owns the store. Later ones and unfinished uploads are removed, too. None = the
                caller does not own it, so an unfinished upload may be one under way.
            uploading: Name that must not be touched.
        """
        committed, partial = self._sizes()
        abandoned = [name for other, name, _ in committed if step is not None and other > step]
        newest_first = sorted((entry for entry in committed if entry[1] not in abandoned), reverse=True)
        # A step may be there twice, from before and after a resumption.
        steps: set[int] = set()
        oldest_kept = len(newest_first)
        for number, (other, name, _) in enumerate(newest_first):
            if len(steps) == max(1, keep_last) and other not in steps:
                oldest_kept = number
                break
            if not self.find_problem(name):
                steps.add(other)
        older = [name for _, name, _ in newest_first[oldest_kept:]]
        partial = partial if step is not None else []
        scores: dict[str, float] = {}
        # The best is looked for only where something older is about to go.
        for _, name, _ in newest_first if older else ():
            try:
                if (score := self.read_commit(name).score) is not None:
                    scores[name] = score
            except CheckpointError:
                continue
        best = min(scores, key=lambda name: (scores[name], name)) if scores else ""
        surplus = [name for name in [*abandoned, *older, *partial] if name not in (best, uploading)]
        for name in surplus:
            self.remove(name)
        return surplus

    def fetch_records(self, run: Path) -> None:
        """Download the files of the run folder: plan, tokenizer, metrics. They replace what is there."""
        names = [file.name for file in persist(self.location.list_files) if "/" not in file.name]
        run.mkdir(parents=True, exist_ok=True)
        download([(self.location / name, run / name, "") for name in names if not name.startswith(".")])

    def fetch(self, name: str, checkpoints: Path, part: tuple[int, int] = (0, 1)) -> Path:
        """Download every n-th file of a checkpoint that is missing or damaged. `part`: (index, n).

        Returns the hidden folder that `publish` makes visible once all parts are there. Raises StoreError,
        DamagedCheckpoint.
        """
        commit, hidden = self.read_commit(name), checkpoints / f"{checkpoint_folder.FETCHING}{name}"
        hidden.mkdir(parents=True, exist_ok=True)
        local = checkpoints / f"step-{commit.step:06d}"
        index, parts = part
        triples = []
        for file in commit.files[index::parts]:
            for path in (hidden / file.name, local / file.name):
                if path.is_file() and path.stat().st_size == file.size_bytes and hash_file(path) == file.sha256:
                    if path.parent == local:
                        shutil.copyfile(path, hidden / file.name)
                    break
            else:
                triples.append((self.checkpoints / name / file.name, hidden / file.name, file.sha256))
        download(triples)
        return hidden

    def publish(self, name: str, hidden: Path) -> Path:
        """Write COMMIT into a downloaded checkpoint and make it visible. Returns its path."""
        commit = self.read_commit(name)
        checkpoint_folder.check_sizes(hidden, commit)
        write_file(hidden / COMMIT, checkpoint_folder.encode_commit(commit))
        sync_folder(hidden)
        target = hidden.parent / f"step-{commit.step:06d}"
        checkpoint_folder.publish(hidden, target)
        return target


class Mirror:
    """Uploads of a run by this rank, in a process of its own. At most one checkpoint is on its way.

    A process, because the libraries of object stores draw from Python's global random generator, whose state is part
    of a checkpoint. It also holds no lock that training needs, and may hang alone. It ends with this one.

    Args:
        store: Its URL, limits and retention.
        writers: Number of ranks, which share the bandwidth.
        waiting: Called every second while a caller waits, for a watchdog.
    """

    def __init__(
        self, store: Store, *, rank: int, writers: int, waiting: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        self.rank, self.writers, self.waiting = rank, writers, waiting
        self.error: StoreError | None = None
        """Why the last upload failed. The next one that succeeds clears it."""
        self._step: int | None = None
        self._lock = Lock()
        """Held while the step on its way changes: this thread begins an upload, another one ends it."""
        self._idle = Event()
        self._idle.set()
        settings = {"url": store.url, "keep_last": store.keep_last, "bandwidth": store.bandwidth / writers}
        # A session of its own: Ctrl-C in a terminal is for the run, which still has a checkpoint to upload.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVE, json.dumps(settings), str(rank), str(writers)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._thread = Thread(target=self._read_answers, name="uploads", daemon=True)
        self._thread.start()

    @property
    def step(self) -> int | None:
        """Step of the checkpoint on its way, which must not be removed. None = none."""
        return self._step

    def choose(self, step: int, *, last: bool) -> str:
        """Return the name under which rank 0 uploads a checkpoint. Empty = it stays local.

        The last one of a run waits for the one before. Any other is left out while the store is busy.
        """
        if last:
            self.wait()
        elif not self._idle.is_set():
            log.warning(
                "step %d stays on local disk: the upload of step %s is under way. Save less often "
                "(recipe.checkpoint_every), or raise store.bandwidth",
                step,
                self._step,
            )
            return ""
        return f"step-{step:06d}-{secrets.token_hex(4)}"

    def begin(self, step: int, path: Path, name: str) -> None:
        """Start to upload a committed local checkpoint. All ranks call this with the name that rank 0 chose."""
        with self._lock:
            self._idle.clear()
            self._step = step
        request = json.dumps({"step": step, "path": str(path.absolute()), "name": name})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except OSError:
            self._end(step, f"the process that uploads has ended ({self._process.poll()})")

    def wait(self) -> None:
        """Wait for the upload on its way."""
        while not self._idle.wait(1.0):
            self.waiting()

    def close(self) -> None:
        """Wait for the last upload. Raises StoreError when it failed: the store has an older state than this disk."""
        self.wait()
        self.abandon()
        if self.error is not None:
            raise self.error

    def abandon(self, grace_s: float = 0.0) -> None:
        """End the process, whatever it uploads. What is not committed within `grace_s` never will be."""
        self._idle.wait(grace_s)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._thread.join()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for answer in answers:
                self._end(*json.loads(answer))
        if (step := self._step) is not None:
            self._end(step, f"the process that uploads has ended ({self._process.wait()})")

    def _end(self, step: int, problem: str) -> None:
        """Take the outcome of an upload. Empty = it succeeded."""
        # On another rank than 0 the next upload may begin before this thread has read the answer.
        with self._lock:
            if step != self._step:
                return
            self._step = None
            self.error = None
            self._idle.set()
        if problem:
            self.error = StoreError(f"the checkpoint of step {step} is on local disk alone: {problem}")
            log.warning("%s", self.error)


class Uploader:
    """The other end of a `Mirror`: uploads what one rank wrote."""

    def __init__(self, store: Store, rank: int, writers: int) -> None:
        self.run, self.store = StoredRun(Location.open(store.url)), store
        self.rank, self.writers = rank, writers
        self._throttle = Throttle(store.bandwidth * 1e6)
        self._uploaded: dict[str, tuple[int, int]] = {}
        """Records in the store, by name: time of change and size."""

    def upload(self, step: int, path: Path, name: str) -> None:
        """Upload this rank's files of a checkpoint. Rank 0 then waits for all others and commits."""
        commit = checkpoint_folder.read_commit(path)
        target = self.run.checkpoints / name
        # A checkpoint that an earlier process wrote may have files of more ranks than there are now.
        names = [file.name for file in commit.files if _writer_of(file.name) % self.writers == self.rank]
        upload([(path / file, target / file) for file in names], self._throttle)
        if self.rank:
            return
        self._upload_records(path.parent.parent)
        self._wait_for_files(target, commit)
        persist(lambda: (target / COMMIT).write(checkpoint_folder.encode_commit(commit)))
        # Only now: until the new one is committed, the old ones are all there is.
        try:
            self.run.prune(self.store.keep_last, step=step, uploading=name)
        except StoreError as error:
            # The checkpoint itself is safe, and the next upload prunes again.
            log.warning("old checkpoints remain: %s", error)

    def report_failure(self, name: str) -> None:
        """Tell rank 0, if the store can be written at all, that the files of this rank will not come."""
        with suppress(Exception):
            persist(lambda: (self.run.checkpoints / name / f"{_FAILED}{self.rank}").write(b""))

    def _upload_records(self, folder: Path) -> None:
        """Upload the files of the run folder that have changed since."""
        changed = {}
        for file in folder.iterdir():
            if file.is_file() and not file.name.startswith(".") and file.name not in NOT_MIRRORED:
                status = file.stat()
                changed[file.name] = (status.st_mtime_ns, status.st_size)
        names = [name for name, version in sorted(changed.items()) if self._uploaded.get(name) != version]
        upload([(folder / name, self.run.location / name) for name in names], self._throttle)
        self._uploaded |= {name: changed[name] for name in names}

    def _wait_for_files(self, target: Location, commit: Commit) -> None:
        """Wait until the store has every file in full length. Raises StoreError when other ranks send nothing more."""
        needed = {file.name: file.size_bytes for file in commit.files}
        pause_s, longest_s = POLL_S
        last_missing, since_s = len(needed), time.monotonic()
        while True:
            present = {file.name: file.size_bytes for file in persist(target.list_files)}
            missing = [name for name, size in needed.items() if present.get(name) != size]
            if not missing:
                return
            if failed := [name.removeprefix(_FAILED) for name in present if name.startswith(_FAILED)]:
                raise StoreError(f"rank {failed[0]} could not upload its files: see what it prints")
            if len(missing) < last_missing:
                last_missing, since_s = len(missing), time.monotonic()
            if time.monotonic() - since_s > LONGEST_WAIT_S:
                raise StoreError(
                    f"{target}: {many(len(missing), 'file')} of other ranks did not come within "
                    f"{LONGEST_WAIT_S / 60:.0f} minutes, the first is {missing[0]}: see what those ranks print"
                )
            time.sleep(pause_s)
            pause_s = min(longest_s, pause_s * 1.5)


def _writer_of(name: str) -> int:
    """Return the rank that wrote a file of a checkpoint. All but shards are rank 0's."""
    match = re.match(r"shard-(\d+)-", name)
    return int(match[1]) - 1 if match else 0


def serve_uploads(settings: str, rank: str, writers: str) -> None:
    """Upload what standard input asks for, one JSON line each. Answers with a line: what failed, or empty."""
    # A cluster sends its signals to every process of a job, and the last checkpoint is still to be uploaded.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # Libraries may print: only answers go to the pipe, all else to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: SimpleQueue[str] = SimpleQueue()

    def read_requests() -> None:
        for line in sys.stdin:
            requests.put(line)
        # The run has ended, perhaps by a kill: nobody may commit, or remove anything, in its name any more.
        os._exit(0)

    Thread(target=read_requests, daemon=True).start()
    uploader = Uploader(Store(**json.loads(settings)), int(rank), int(writers))
    while True:
        request = json.loads(requests.get())
        problem = ""
        try:
            uploader.upload(request["step"], Path(request["path"]), request["name"])
        except Exception as error:  # whatever it is, the run must hear of it
            problem = str(error) or repr(error)
            uploader.report_failure(request["name"])
        print(json.dumps([request["step"], problem]), file=answers, flush=True)


def check_store(store: Store, resume: str) -> int | None:
    """Return the step of the newest checkpoint in the store. None = it has none. Raises PlanError, StoreError.

    Refused are a store that cannot be written, with resume=no one that holds a run already, and with the path of a
    checkpoint one that holds later steps.
    """
    run = StoredRun(Location.open(store.url))
    run.location.refuse_unwritable("store.url")
    stored = run.list_checkpoints()
    if stored and resume not in ("no", "auto"):
        step = checkpoint_folder.read_commit(Path(resume)).step
        # Until the first new checkpoint is there, resume=auto would go on with the course that is abandoned here.
        if stored[-1].step > step:
            raise StoreError(
                f"{argument('store.url', store.url)} has checkpoints up to step {stored[-1].step}, and the run goes "
                f"back to step {step}: choose another {argument('store.url')}"
            )
    if stored and resume == "no":
        raise StoreError(
            f"{argument('store.url', store.url)} already holds a run (last checkpoint: step {stored[-1].step}): "
            f"resume=auto continues it, or choose another {argument('store.url')}"
        )
    return stored[-1].step if stored else None


def choose_newer(run: StoredRun, folder: Path, damaged: Collection[str] = ()) -> str:
    """Return the name of the newest sound checkpoint in the store. Empty = local disk is as new, or newer.

    `folder`: the run's folder. `damaged`: names that turned out to be damaged. Raises RunError when the disk of the
    folder has too little room, DamagedCheckpoint when nothing but damaged checkpoints is there.
    """
    local = [saved.step for saved in checkpoint_folder.list_checkpoints(folder / CHECKPOINTS) if not saved.problem]
    for stored in reversed(run.list_checkpoints()):
        if local and stored.step <= max(local):
            break
        if stored.name in damaged:
            continue
        if problem := run.find_problem(stored.name):
            log.warning("passed over: checkpoint %s: %s", run.checkpoints / stored.name, problem)
            continue
        free = free_bytes(folder)
        if free is not None and free < stored.size_bytes:
            raise RunError(
                f"{argument('run', folder)}: its disk has {gib(free)} free, and the checkpoint of step {stored.step} "
                f"in {run.location} takes {gib(stored.size_bytes)}: free some space, or choose another "
                f"{argument('run')}"
            )
        return stored.name
    if damaged and not local:
        raise DamagedCheckpoint(
            f"no checkpoint of {run.location} can be used: see `meshwright runs {run.location} --verify`"
        )
    return ""
