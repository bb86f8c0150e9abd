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
"""Longest wait for the removal of a mark. The next start waits for one that stays, if it is on another machine."""
_SILENT: set[tuple[str, str]] = set()
"""Runs and marks that stayed while this process looked. It waits for none of them again."""

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

    @classmethod
    def find(cls, number: int) -> "Process":
        """Describe a process of this machine, or what is known of one that is gone."""
        # Here: the upload process, which is told who it works for, does without torch.
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


class Ownership:
    """The mark of a run's owner, as one process sees and writes it."""

    def __init__(self, run: Location, process: Process | None = None) -> None:
        self.run, self.process = run, process or Process.find(os.getpid())
        self.lost: Superseded | None = None
        """Why this run ends, once a beat has met the mark of another process."""
        self._file = run / OWNER
        self._ended = Event()
        self._beating: Thread | None = None

    def _read(self, file: Location | None = None) -> tuple[Process | None, str]:
        """Return the owner and what its mark says. None = the run has none, or one of another version."""
        with suppress(FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            content = (file or self._file).read().decode()
            owner = json.loads(content)["process"]
            return Process(owner["host"], owner["namespace"], int(owner["number"]), owner["started"]), content
        return None, ""

    def _write(self, beats: int, file: Location) -> None:
        file.write(json.dumps({"process": asdict(self.process), "beat": beats}).encode())

    @property
    def is_lost(self) -> bool:
        """True when another process has taken over."""
        return self._read()[0] not in (None, self.process)

    def refuse_lost(self) -> None:
        """Raise Superseded when another process has taken over."""
        owner, _ = self._read()
        if owner not in (None, self.process):
            raise self._superseded(owner)

    def _superseded(self, owner: Process) -> Superseded:
        who = f"{printable(owner.host)} (process {owner.number})"
        return Superseded(f"{self.run} has been taken over by {who}, so this run ends here")

    def refuse_another(self) -> None:
        """Raise StoreError while another process trains the run. Waits when that may have died."""
        owner, content = self._read()
        if owner in (None, self.process) or owner.is_gone or (self.run.url, content) in _SILENT:
            return
        who = f"{printable(owner.host)} (process {owner.number})"
        log.warning("%s was last trained on %s: is that process alive? Waiting %.0f s", self.run, who, SILENT_S)
        ends_s = time.monotonic() + SILENT_S
        while time.monotonic() < ends_s:
            time.sleep(POLL_S)
            now, mark = self._read()
            if now is None or now.is_gone:
                return
            if mark != content:
                raise self._refusal(f"is being trained on {printable(now.host)} (process {now.number}): end that first")
        _SILENT.add((self.run.url, content))

    def _refusal(self, reason: str) -> StoreError:
        url = argument("store.url", self.run.url)
        return StoreError(f"{url} {reason}, or choose another {argument('store.url')}")

    def claim(self) -> None:
        """Take the run over, and say that this process lives until `release`. Raises StoreError beside another one."""
        self.refuse_another()
        self._write(0, self._file)
        time.sleep(SETTLE_S)
        if self.is_lost:
            raise self._refusal("was started by another process at the same moment: end one of them")
        self._beating = Thread(target=self._beat, daemon=True)
        self._beating.start()

    def _beat(self) -> None:
        # One attempt each: the pauses of several would be longer than the silence of the dead.
        beats, pause_s, file = 0, BEAT_S, replace(self._file, attempts=1)
        while not self._ended.wait(pause_s):
            pause_s = RETRY_S
            with suppress(StoreError):
                owner, _ = self._read(file)
                if owner not in (None, self.process):
                    self.lost = self._superseded(owner)
                    return
                beats += 1
                self._write(beats, file)
                pause_s = BEAT_S
        with suppress(StoreError):
            if self._read(file)[0] == self.process:
                file.remove()

    def release(self) -> None:
        """Remove the mark, unless another process has taken over."""
        self._ended.set()
        if self._beating is not None:
            self._beating.join(RELEASE_S)
