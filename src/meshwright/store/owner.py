"""Ownership of a run behind a URL: one process trains it. Two, each with a disk of its own, would ruin it for both.

Rank 0 writes URL/.owner every BEAT_S, with a number that it raises. A process that starts waits until the number stays,
for SILENT_S: clocks of machines differ. After a process that ended by itself, and after one of this machine that is
gone, nobody waits. Who has lost the run uploads nothing more. Why: docs/decisions/0074-one-owner-of-a-stored-run.md.
"""

import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Thread

from meshwright.remote.locations import Location
from meshwright.spec.errors import StoreError, argument, printable

OWNER = ".owner"
"""File of a store. No listing of a run's own files shows it."""
BEAT_S, RETRY_S = 20.0, 2.0
"""Pauses after a beat, and after one that failed."""
SILENT_S, POLL_S = 60.0, 5.0
"""Silence after which an owner is taken for dead, and pause between two looks at it."""
SETTLE_S = 1.0
"""Time in which another process, which looked at the same moment, has written its mark too."""
RELEASE_S = 5.0
"""Longest wait for the last word of a mark. Without it, the next start waits, if it is on another machine."""

log = logging.getLogger(__name__)


class Superseded(StoreError):
    """The run has been taken over by another process."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of some machine, unlike any other before or after it."""

    host: str
    namespace: str
    """Machine, since its last start, and container: process numbers mean something only there."""
    number: int
    started: str
    """Time of its start in ticks of its machine, since numbers are used again. Empty = unknown."""

    def __str__(self) -> str:
        return f"{printable(self.host)} (process {self.number})"

    @classmethod
    def find(cls, number: int) -> "Process":
        """Describe a process of this machine, or what is known of one that is gone."""
        # Imported here: the upload process imports this module, and would load torch.
        from meshwright.parallel.health.heartbeat import namespace_id

        started = ""
        with suppress(OSError):
            fields = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            started = fields[19] if fields[0] not in "ZX" else ""  # a zombie has ended
        return cls(os.uname().nodename, namespace_id(), number, started)

    @property
    def is_gone(self) -> bool:
        """True when it ran here and does not any more. False says nothing about processes elsewhere."""
        here = Process.find(self.number)
        return bool(self.started) and here.namespace == self.namespace and here.started != self.started


@dataclass(frozen=True, slots=True)
class Mark:
    """Contents of a run's mark."""

    process: Process
    beat: int | None
    """Rises while the process lives. None = it has ended. Its name stays, for one that was frozen and wakes."""


class Ownership:
    """The mark of a run's owner, as one process sees and writes it."""

    def __init__(self, run: Location, process: Process | None = None) -> None:
        self.run, self.process = run, process or Process.find(os.getpid())
        self.lost: Superseded | None = None
        """Why this run ends, once a beat has met the mark of another process."""
        self._file = run / OWNER
        self._ended = Event()
        self._beating: Thread | None = None

    def _read(self, file: Location | None = None) -> Mark | None:
        """Read the mark. None = there is none, or one of another version."""
        with suppress(FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            mark = json.loads((file or self._file).read())
            owner = mark["process"]
            process = Process(owner["host"], owner["namespace"], int(owner["number"]), owner["started"])
            return Mark(process, None if mark["beat"] is None else int(mark["beat"]))
        return None

    def _write(self, beat: int | None, file: Location) -> None:
        file.write(json.dumps({"process": asdict(self.process), "beat": beat}).encode())

    def refuse_lost(self, file: Location | None = None) -> None:
        """Raise Superseded when another process has taken over, and has perhaps ended since."""
        mark = self._read(file)
        if mark is not None and mark.process != self.process:
            raise Superseded(f"{self.run} has been taken over by {mark.process}, so this run ends here")

    def _is_free(self, mark: Mark | None) -> bool:
        return mark is None or mark.beat is None or mark.process == self.process or mark.process.is_gone

    def refuse_another(self) -> None:
        """Raise StoreError while another process trains the run. Waits when that may have died."""
        first = self._read()
        if first is None or self._is_free(first):
            return
        log.warning("%s was last trained on %s: does it live? Waiting %.0f s", self.run, first.process, SILENT_S)
        ends_s = time.monotonic() + SILENT_S
        while time.monotonic() < ends_s:
            time.sleep(POLL_S)
            mark = self._read()
            if mark is None or self._is_free(mark):
                return
            if mark != first:
                raise self._refusal(f"is being trained on {mark.process}: end that first")

    def _refusal(self, reason: str) -> StoreError:
        url = argument("store.url", self.run.url)
        return StoreError(f"{url} {reason}, or choose another {argument('store.url')}")

    def claim(self) -> None:
        """Take the run over, and say that this process lives until `release`. Raises StoreError beside another one."""
        self.refuse_another()
        self._write(0, self._file)
        # Its first beat is later. It ends the mark, too, whatever interrupts what follows.
        self._beating = Thread(target=self._beat, name="owner", daemon=True)
        self._beating.start()
        time.sleep(SETTLE_S)
        try:
            self.refuse_lost()
        except Superseded:
            raise self._refusal("was started by another process at the same moment: end one of them") from None

    def _beat(self) -> None:
        # One attempt each: the pauses of several would be longer than the silence of the dead.
        beat, pause_s, file = 0, BEAT_S, replace(self._file, attempts=1)
        written_s = time.monotonic()
        while not self._ended.wait(pause_s):
            pause_s = RETRY_S
            try:
                self.refuse_lost(file)
                beat += 1
                self._write(beat, file)
                pause_s, written_s = BEAT_S, time.monotonic()
            except Superseded as error:
                self.lost = error
                return
            except (StoreError, FileNotFoundError) as error:
                if time.monotonic() - written_s > SILENT_S:
                    log.warning("another start may take this run over: %s", error)
                    written_s = time.monotonic()
        with suppress(StoreError, FileNotFoundError):
            self.refuse_lost(file)
            self._write(None, file)

    def release(self) -> None:
        """Mark the run as ended, unless another process has taken over."""
        self._ended.set()
        if self._beating is not None:
            self._beating.join(RELEASE_S)
