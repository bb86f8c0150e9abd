"""Ownership of a run behind a URL: one process trains it. Two, each with a disk of its own, would ruin it for both.

The upload process of rank 0 writes URL/.owner every BEAT_S, with a number that it raises. A process that starts waits
until the number stays, for SILENT_S: clocks of machines differ. After a process that ended by itself, and after one of
this machine that is gone, nobody waits.
"""

import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread

from meshwright.remote.locations import Location
from meshwright.spec.errors import StoreError, argument

OWNER = ".owner"
"""File of a store. No listing of a run's own files shows it."""
BEAT_S, SILENT_S, POLL_S = 20.0, 60.0, 5.0
"""Pause between beats; silence after which an owner is taken for dead; pause between two looks."""

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


@dataclass(frozen=True, slots=True)
class Ownership:
    """The mark of a run's owner, seen by one process."""

    run: Location
    process: Process

    @property
    def _file(self) -> Location:
        return self.run / OWNER

    def _read(self) -> tuple[Process | None, str]:
        """Return the owner and what its mark says. None = the run has none, or one of another version."""
        with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
            content = self._file.read().decode()
            return Process(**json.loads(content)["process"]), content
        return None, ""

    @property
    def is_lost(self) -> bool:
        """True when another process has taken over."""
        return self._read()[0] not in (None, self.process)

    def refuse_lost(self) -> None:
        """Raise Superseded when another process has taken over."""
        if self.is_lost:
            raise Superseded(f"{self.run} has been taken over by another process, so this one ends")

    def refuse_another(self) -> None:
        """Raise StoreError while another process trains the run. Waits when that may have died."""
        owner, content = self._read()
        if owner in (None, self.process) or owner.is_gone:
            return
        log.warning(
            "%s was trained on %s (process %d), which did not say that it ended: waiting for %.0f s whether it goes on",
            self.run, owner.host, owner.number, SILENT_S,
        )  # fmt: skip
        ends_s = time.monotonic() + SILENT_S
        while time.monotonic() < ends_s:
            time.sleep(POLL_S)
            now, mark = self._read()
            if now is None or now.is_gone:
                return
            if mark != content:
                raise StoreError(
                    f"{argument('store.url', self.run.url)} is being trained on {now.host} (process {now.number}): "
                    f"end that one first, or choose another {argument('store.url')}"
                )

    def hold(self) -> None:
        """Take the run over, and say every BEAT_S that this process lives, until another one takes over."""
        beats = 0

        def beat() -> None:
            self._file.write(json.dumps({"process": asdict(self.process), "beat": beats}).encode())

        def go_on() -> None:
            nonlocal beats
            while True:
                time.sleep(BEAT_S)
                with suppress(StoreError):  # it lives all the same, and commits nothing while the store is away
                    if self.is_lost:
                        return
                    beats += 1
                    beat()

        with suppress(StoreError):
            beat()
        Thread(target=go_on, daemon=True).start()

    def release(self) -> None:
        """Remove the mark, after its beats have ended, unless another process has taken over."""
        with suppress(StoreError):
            if not self.is_lost:
                self._file.remove()
