"""Copies of files to and from URLs: in parallel, repeated after failures, within a bandwidth, checked by hash."""

import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from meshwright.remote.locations import Location
from meshwright.spec.errors import StoreError

THREADS = 8
"""Files on their way at once. A single stream reaches a fraction of what an object store gives to many."""
ATTEMPTS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
"""Pauses before another attempt double from the first to the longest. Eight attempts take about a minute."""
PIECE_BYTES = 8 * 2**20
"""Bytes between two looks at the clock where the bandwidth is limited, and per part of such an upload."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class Throttle:
    """A limit on bytes per second, shared by all threads of a process. 0 = none."""

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self.bytes_per_second = bytes_per_second
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def wait(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more may be sent."""
        if not self.bytes_per_second:
            return
        with self._lock:
            start_s = max(self._free_at_s, time.monotonic())
            self._free_at_s = start_s + size_bytes / self.bytes_per_second
        time.sleep(max(0.0, start_s - time.monotonic()))


NO_LIMIT = Throttle()


def persist(work: Callable[[], T]) -> T:
    """Repeat a request until it succeeds, with growing pauses, at most ATTEMPTS times.

    What no repetition can cure is raised at once: a missing file, missing credentials, a missing right.
    """
    for attempt in range(ATTEMPTS):
        try:
            return work()
        except StoreError as error:
            if not error.may_pass or attempt == ATTEMPTS - 1:
                raise
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)
            log.debug("%s: attempt %d of %d", error, attempt + 1, ATTEMPTS)
        # Ranks that failed together must not come back together.
        time.sleep(pause_s * (0.5 + random.Random().random()))
    raise AssertionError("the last attempt returns or raises")


def upload(pairs: Sequence[tuple[Path, Location]], throttle: Throttle = NO_LIMIT) -> None:
    """Copy local files to URLs, several at once. Raises StoreError, FileNotFoundError for a missing local file."""

    def send(source: Path, target: Location) -> None:
        if not throttle.bytes_per_second:
            persist(lambda: target.upload(source))
            return

        def send_slowly() -> None:
            # Closing the stream sends the last part.
            with target.reporting(), source.open("rb") as file, target.create_file(PIECE_BYTES) as stream:
                while piece := file.read(PIECE_BYTES):
                    throttle.wait(len(piece))
                    stream.write(piece)

        persist(send_slowly)

    _run_all(send, pairs)


def download(triples: Sequence[tuple[Location, Path, str]]) -> None:
    """Copy (URL, local path, SHA-256 or "") to local files, several at once. Each is complete or absent.

    Raises StoreError when a file cannot be read, is missing, or has another hash even at the second attempt.
    """

    def fetch(source: Location, target: Path, sha256: str) -> None:
        fresh = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            for is_last in (False, True):
                try:
                    persist(lambda: source.download(fresh))
                except FileNotFoundError:
                    raise StoreError(f"{source} is not there: it was removed, or never uploaded") from None
                if not sha256 or hash_file(fresh) == sha256:
                    break
                # A transfer may have lost bytes: only a second one shows that the store itself holds others.
                if is_last:
                    failure = StoreError(f"{source} is damaged: its hash differs from the recorded one")
                    failure.is_damage = True
                    raise failure
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            fresh.replace(target)
        finally:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)

    _run_all(fetch, triples)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a local file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run_all(work: Callable[..., None], arguments: Iterable[tuple[object, ...]]) -> None:
    """Call `work` with each tuple of arguments on a pool of threads. The first error ends what has not begun."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(work, *each) for each in arguments]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
