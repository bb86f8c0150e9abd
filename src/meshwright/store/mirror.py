"""Upload of a run's checkpoints and records to its store, after they were written to local disk (stored_run.py).

Each rank uploads the files that it wrote. Rank 0 waits until the store lists all of them, then uploads COMMIT: ranks
need no exchange, and one that dies leaves nothing that looks like a checkpoint.
"""

import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

from meshwright.remote.locations import Location
from meshwright.remote.transfer import Throttle, upload
from meshwright.spec.errors import StoreError
from meshwright.spec.plan.plan import Store
from meshwright.spec.units import many
from meshwright.store import checkpoint_folder
from meshwright.store.checkpoint_folder import COMMIT, Commit
from meshwright.store.owner import Ownership, Process, Superseded
from meshwright.store.stored_run import StoredRun

_FAILED = "failed-"
"""Start of the name of a file with the reason why a rank could not upload its own."""
READY = "ready\n"
"""First line of the upload process."""
POLL_S = (0.2, 5.0)
"""First and longest pause of rank 0 between two looks for the files of other ranks."""
SILENT_S = 5
"""Longest wait for an upload without a word."""
LONGEST_WAIT_S = 1800.0
"""Longest wait without a new file of another rank."""
SERVE = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from meshwright.store.mirror import serve_uploads
serve_uploads(sys.argv[1])
"""
"""Program of the upload process. It imports this very package, whatever the current folder holds."""
RECORDS = frozenset({"plan.yaml", "metrics.jsonl"})
"""Files without which a run cannot go on."""
NOT_MIRRORED = ("loss.png",)
"""Files of a run folder that are not uploaded, in addition to hidden ones: a picture is drawn again."""

log = logging.getLogger(__name__)


class Mirror:
    """Uploads of a run by this rank, in a process of its own. At most one checkpoint is on its way.

    A process holds no lock that training needs, and may hang or die alone. It ends with this one.

    Args:
        store: Its URL, limits and retention.
        ownership: Ownership of the run by this process, claimed on rank 0.
        writers: Number of ranks, which share the bandwidth.
        waiting: Called every second while a caller waits, for a watchdog.
    """

    def __init__(
        self, store: Store, ownership: Ownership, *, rank: int, writers: int,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.ownership, self.rank, self.writers, self.waiting = ownership, rank, writers, waiting
        self.error: StoreError | None = None
        """Why the last upload failed. The next one that succeeds clears it."""
        self.committed: int | None = None
        """Step of the last checkpoint that this process uploaded."""
        self.skipped_step: int | None = None
        """Step of the last checkpoint if rank 0 skipped its upload. None = it did not."""
        self._settings = {
            "store": {"url": store.url, "keep_last": store.keep_last, "bandwidth": store.bandwidth / writers},
            "process": asdict(self.ownership.process), "rank": rank, "writers": writers,
        }  # fmt: skip
        self._is_limited = bool(store.bandwidth)
        self._step = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="uploads")
        self._upload: Future[None] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()
        """Held while the process changes: another thread starts it again."""
        self._abandoned = False

    @property
    def step(self) -> int | None:
        """Step of the checkpoint on its way, which must not be removed. None = none."""
        return None if self._upload is None or self._upload.done() else self._step

    @property
    def superseded(self) -> Superseded | None:
        """Why the run ends, once another process has taken it over."""
        error = self.error
        return self.ownership.lost or (error if isinstance(error, Superseded) else None)

    def choose(self, step: int, *, last: bool) -> str:
        """Return the name under which rank 0 uploads a checkpoint. Empty = it stays local.

        The last one of a run waits for the upload under way. Any other is skipped meanwhile.
        """
        self.skipped_step = None
        if last:
            self.wait()
        elif (under_way := self.step) is not None:
            other_remedy = ", or raise store.bandwidth" if self._is_limited else ""
            log.warning(
                "step %d is not uploaded: the upload of step %d is under way. Save less often "
                "(recipe.checkpoint_every)%s", step, under_way, other_remedy,
            )  # fmt: skip
            self.skipped_step = step
            return ""
        return f"step-{step:06d}-{secrets.token_hex(4)}"

    def begin(self, step: int, path: Path, name: str) -> None:
        """Start to upload a committed local checkpoint. All ranks call this with the name that rank 0 chose."""
        # On another rank than 0 the one before may not have been answered yet: this one waits behind it.
        request = json.dumps({"path": str(path.absolute()), "name": name})
        self._step, self._upload = step, self._thread.submit(self._send, step, request)

    def wait(self) -> None:
        """Wait for the upload on its way, and say so when it takes seconds: users would take it for a hang."""
        seconds = 0
        while self._upload is not None and wait([self._upload], 1.0).not_done:
            self.waiting()
            seconds += 1
            if seconds == SILENT_S and self.rank == 0:
                log.warning("waiting until step %d is in the store (Ctrl-C twice leaves it local)", self._step)

    def abandon(self, grace_s: float = 0.0) -> None:
        """End the process, whatever it uploads. What is not committed within `grace_s` never will be."""
        if self._upload is not None:
            wait([self._upload], grace_s)
        with self._lock:
            self._abandoned = True
            self._end_process()
        self._thread.shutdown()

    def start(self) -> None:
        """Start the process, or start it again after it has ended. Raises StoreError if it does not get ready."""
        with self._lock:
            self._end_process()
            if self._abandoned:
                raise StoreError("the run has ended")
            # A session of its own: Ctrl-C in a terminal is for the run, which still has a checkpoint to upload.
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVE, json.dumps(self._settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        if _read_line(process) != READY:
            with self._lock:
                self._end_process()
            raise StoreError(f"the upload process does not start (exit code {process.wait()}): see its output")

    def _end_process(self) -> None:
        if (process := self._process) is not None and process.stdin is not None:
            # It ends when it has nothing more to read. Leaving it closes the other pipe and waits.
            with process, suppress(OSError):
                process.stdin.close()

    def _send(self, step: int, request: str) -> None:
        """Have a checkpoint uploaded. The process is started again if it has ended, once per checkpoint."""
        assert self._process is not None
        answer = _read_line(self._process, request)
        if not answer and not self._abandoned:
            log.warning("the upload process has ended at step %d: it is started again", step)
            try:
                self.start()
                answer = _read_line(self._process, request)
            except (StoreError, OSError) as error:  # OSError: this machine starts no process
                answer = json.dumps([str(error), False])
        problem, is_superseded = json.loads(answer) if answer else ("the upload process has ended", False)
        kind = Superseded if is_superseded else StoreError
        # Assigned once: other threads read it.
        self.error = kind(f"the checkpoint of step {step} is not in the store: {problem}") if problem else None
        if problem:
            log.warning("%s", self.error)
        else:
            self.committed = step


def _read_line(process: "subprocess.Popen[str]", request: str = "") -> str:
    """Return the next line of a process, after a request. Empty = it has ended."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(OSError, ValueError):  # a pipe is closed at the other end, or at this one
        if request:
            process.stdin.write(request + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        # One that was killed may leave half a line.
        return line if line.endswith("\n") else ""
    return ""


class Uploader:
    """The other end of a `Mirror`: uploads what one rank wrote. `process`: the one that trains."""

    def __init__(self, store: Store, rank: int, writers: int, process: Process) -> None:
        self.run, self.store = StoredRun(Location.open(store.url)), store
        self.ownership = Ownership(self.run.location, process)
        self.rank, self.writers = rank, writers
        self._throttle = Throttle(store.bandwidth * 1e6) if store.bandwidth else None
        self._uploaded: dict[str, tuple[int, int]] = {}
        """Records in the store, by name: time of change and size."""

    def upload(self, path: Path, name: str) -> None:
        """Upload this rank's files of a checkpoint. Rank 0 then waits for all others and commits."""
        commit = checkpoint_folder.read_commit(path)
        target = self.run.checkpoints / name
        # A checkpoint that an earlier process wrote may have files of more ranks than there are now.
        files = [file for file in commit.files if _writer_of(file.name) % self.writers == self.rank]
        upload([(path / file.name, target / file.name, file.sha256) for file in files], self._throttle)
        if self.rank:
            return
        self.ownership.refuse_lost()
        self.upload_records(path.parent.parent)
        self._wait_for_files(target, commit)
        (target / COMMIT).write(checkpoint_folder.encode_commit(commit))
        try:
            self.ownership.refuse_lost()
            # Only now: until the new one is committed, the old ones are all there is.
            self.run.prune(self.store.keep_last, step=commit.step, uploading=name)
        except Superseded:  # while COMMIT was written, perhaps at the eighth attempt
            with suppress(StoreError):
                self.run.remove(name)
            raise
        except StoreError as error:
            # The checkpoint itself is safe, and the next upload prunes again.
            log.warning("old checkpoints remain: %s", error)

    def report_failure(self, name: str, problem: str) -> None:
        """Write for rank 0 why the files of this rank will not come, if the store can be written at all."""
        with suppress(Exception):
            (self.run.checkpoints / name / f"{_FAILED}{self.rank}").write(problem.encode())

    def upload_records(self, folder: Path) -> None:
        """Upload the files of the run folder that have changed since."""
        files = [file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")]
        changed = {f.name: (f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.name not in NOT_MIRRORED}
        # While a folder is being removed, a checkpoint without its metrics would be resumed with a curve cut short.
        if missing := RECORDS - changed.keys():
            raise StoreError(f"{folder / min(missing)} is gone: the run folder was removed while the run used it")
        names = [name for name, version in sorted(changed.items()) if self._uploaded.get(name) != version]
        upload([(folder / name, self.run.location / name, "") for name in names], self._throttle)
        self._uploaded |= {name: changed[name] for name in names}

    def _wait_for_files(self, target: Location, commit: Commit) -> None:
        """Wait until the store has every file in full length. Raises StoreError when other ranks send nothing more."""
        needed = {file.name: file.size_bytes for file in commit.files}
        pause_s, longest_s = POLL_S
        last_missing, since_s = len(needed), time.monotonic()
        while True:
            self.ownership.refuse_lost()  # whoever took over may have removed what is waited for
            present = target.list_sizes()
            missing = [name for name, size in needed.items() if present.get(name) != size]
            if not missing:
                return
            if failed := [name for name in present if name.startswith(_FAILED)]:
                reason = (target / failed[0]).read().decode(errors="replace")
                raise StoreError(f"rank {failed[0].removeprefix(_FAILED)} could not upload its files: {reason}")
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


def serve_uploads(settings_json: str) -> None:
    """Upload what standard input asks for, one JSON line each. Answers with one: [failure or empty, superseded]."""
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
    settings = json.loads(settings_json)
    process = Process(**settings["process"])
    uploader = Uploader(Store(**settings["store"]), settings["rank"], settings["writers"], process)
    print(READY, end="", file=answers, flush=True)
    while True:
        request = json.loads(requests.get())
        problem, is_superseded = "", False
        try:
            uploader.upload(Path(request["path"]), request["name"])
        except Exception as error:  # whatever it is, the run must report it
            problem, is_superseded = str(error) or repr(error), isinstance(error, Superseded)
            if not is_superseded:  # the store is another run's
                uploader.report_failure(request["name"], problem)
        print(json.dumps([problem, is_superseded]), file=answers, flush=True)


def upload_last_records(store: Store, ownership: Ownership, folder: Path) -> None:
    """Upload what a run has written after its last checkpoint. A failure is logged: the checkpoint is there."""
    try:
        ownership.refuse_lost()
        Uploader(store, rank=0, writers=1, process=ownership.process).upload_records(folder)
    except StoreError as error:
        log.warning("the last records of the run are not in the store: %s", error)
