"""Copies of files to and from URLs: in parallel, repeated after failures, within a bandwidth, checked by hash."""

import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from meshwright.remote.locations import PIECE_BYTES, Location, reporting
from meshwright.spec.errors import StoreError

THREADS = 8
"""Files on their way at once. A single stream reaches a fraction of what an object store gives to many."""
ATTEMPTS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
"""Pauses before another attempt double from the first to the longest. Eight attempts take half a minute."""
LONGEST_S = 600.0
"""After this time no third attempt begins: each may itself have waited for the network."""
LEFTOVER_S = 3600.0
"""Age of a part of a file from which on it was left by a process that was killed."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class Throttle:
    """A limit on bytes per second, shared by all threads of a process."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def wait(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more may be sent."""
        with self._lock:
            start_s = max(self._free_at_s, time.monotonic())
            self._free_at_s = start_s + size_bytes / self.bytes_per_second
        time.sleep(max(0.0, start_s - time.monotonic()))


def persist(work: Callable[[], T]) -> T:
    """Repeat a request until it succeeds, with growing pauses, at most ATTEMPTS times or about LONGEST_S.

    What no repetition can cure is raised at once: a missing file, missing credentials, a missing right.
    """
    begun_s = time.monotonic()
    for attempt in range(ATTEMPTS):
        try:
            return work()
        except StoreError as error:
            is_late = attempt > 0 and time.monotonic() - begun_s > LONGEST_S
            if not error.may_pass or is_late or attempt == ATTEMPTS - 1:
                raise
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)
            log.debug("%s: attempt %d of %d", error, attempt + 1, ATTEMPTS)
        # Ranks that failed together must not come back together.
        time.sleep(pause_s * (0.5 + random.Random().random()))
    raise AssertionError("the last attempt returns or raises")


def list_sizes(folder: Location) -> dict[str, int]:
    """Return the size of each file below a folder, at any depth, by its name."""
    return {file.name: file.size_bytes for file in persist(folder.list_files)}


def upload(triples: Sequence[tuple[Path, Location, str]], throttle: Throttle | None = None) -> None:
    """Copy (local path, URL, SHA-256 or "") to URLs, several at once.

    Raises StoreError when a file cannot be sent, is missing, or has another hash: damage does not spread.
    """

    def send(source: Path, target: Location, sha256: str) -> None:
        def attempt() -> None:
            if throttle is None:
                target.upload(source)
                return
            # Closing the stream sends the last part.
            with reporting(target.url), source.open("rb") as file, target.open_file("wb") as stream:
                while piece := file.read(PIECE_BYTES):
                    throttle.wait(len(piece))
                    stream.write(piece)

        try:
            if sha256 and hash_file(source) != sha256:
                raise _report_damage(source)
            persist(attempt)
        except FileNotFoundError:
            lost = target if source.exists() else source
            raise StoreError(f"{lost} is not there any more: {source.name} cannot be uploaded") from None

    with ThreadPoolExecutor(THREADS) as pool:
        # The first error ends what has not begun.
        list(pool.map(lambda triple: send(*triple), triples))


def download(triples: Sequence[tuple[Location, Path, str]], begun: Callable[[], None] = lambda: None) -> None:
    """Copy (URL, local path, SHA-256 or "") to local files, several at once. Each is complete or absent.

    Folders are made as needed. `begun` is called after each piece, by the threads that copy. Raises StoreError when a
    file cannot be read, is missing, has another hash even at the second attempt, or cannot be written here.
    """

    def fetch(source: Location, target: Path, sha256: str) -> None:
        fresh = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            for is_last in (False, True):
                try:
                    persist(lambda: source.download(fresh, begun))
                except FileNotFoundError:
                    raise StoreError(f"{source} is not there: it was removed, or never uploaded") from None
                if not sha256 or hash_file(fresh) == sha256:
                    break
                # A transfer may have lost bytes: only a second one shows that the store itself holds others.
                if is_last:
                    raise _report_damage(source)
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            fresh.replace(target)
        except OSError as error:
            raise StoreError(f"{target} cannot be written: {error.strerror}; free some space, or repair it") from None
        finally:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)

    for folder in {target.parent for _, target, _ in triples}:
        folder.mkdir(parents=True, exist_ok=True)
        remove_parts(folder, LEFTOVER_S)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda triple: fetch(*triple), triples))


def remove_parts(folder: Path, age_s: float) -> None:
    """Remove parts of files that were not written for a time: killed processes left them."""
    for path in folder.glob(".*.part"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= age_s:
                path.unlink()


def _report_damage(file: Path | Location) -> StoreError:
    failure = StoreError(f"{file} is damaged: its hash differs from the recorded one")
    failure.is_damage = True
    return failure


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a local file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
