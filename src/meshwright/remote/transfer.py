"""Copies of many files to and from URLs: in parallel, within a bandwidth, checked by hash."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from meshwright.remote.locations import PIECE_BYTES, HubLocation, Location
from meshwright.spec.errors import StoreError

THREADS = 8
"""Files on their way at once. A single stream reaches a fraction of what an object store gives to many."""
LEFTOVER_S = 3600.0
"""Age of a part of a file from which on it was left by a process that was killed."""


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


def upload(triples: Sequence[tuple[Path, Location, str]], throttle: Throttle | None = None) -> None:
    """Copy (local path, URL, SHA-256 or "") to URLs, several at once.

    Raises StoreError when a file cannot be sent, is missing, or has another hash: damage does not spread.
    """

    def send(source: Path, target: Location, sha256: str) -> None:
        try:
            if sha256 and hash_file(source) != sha256:
                raise _report_damage(source)
            if not isinstance(target, HubLocation):
                target.upload(source, throttle.wait if throttle else None)
        except FileNotFoundError:
            lost = target if source.exists() else source
            raise StoreError(f"{lost} is not there any more: {source.name} cannot be uploaded") from None

    with ThreadPoolExecutor(THREADS) as pool:
        # The first error ends what has not begun.
        list(pool.map(lambda triple: send(*triple), triples))
    if triples and isinstance(first := triples[0][1], HubLocation):
        first.upload_all([(str(source), target) for source, target, _ in triples])


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
                    source.download(fresh, begun)
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
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        # Large pieces: threads that also copy ask for the interpreter twice a piece, and wait for it up to 5 ms.
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
