"""Pool of encoding processes: texts in, token ids out, in the same order, with a bounded amount of memory."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar, final

from meshwright.data.corpus.worker import read_frame, write_frame
from meshwright.data.text.rows import readable_location
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec.errors import DataError

T = TypeVar("T")
Batch = tuple[bytes, Sequence[str]]
"""(flags, texts). flags[i] = 1 if text i continues a document."""

_MOST_PROCESSES = 12
"""Limit of processes. Each holds about 50 MB: twelve and their parent stay below 1 GiB. Further cores are used by
threads."""

_START = (
    "import json, os, sys; os.environ.update(RAYON_NUM_THREADS=sys.argv[1], TOKENIZERS_PARALLELISM='true'); "
    "sys.path[:] = json.loads(sys.stdin.buffer.readline()); from meshwright.data.corpus.worker import serve; serve()"
)


def group_by_size(entries: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Group entries into lists of at least this total size. The last list may be smaller."""
    batch, total = list[T](), 0
    for entry in entries:
        batch.append(entry)
        total += size(entry)
        if total >= least:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def count_cores() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@final
class Pool:
    """Encoding processes for one tokenizer, to be used as a context. `processes` = 1 encodes in this process.

    They are plain commands that receive text through pipes. Nothing is forked, which is safe next to torch's threads,
    and the caller's main module is not imported again.
    """

    def __init__(
        self, tokenizer: Tokenizer, processes: int | None = None, *, samples: str = "", limit_s: float = 0.0
    ) -> None:
        """Set up a pool.

        Args:
            samples: Settings of data/chat/encoder.py if texts are rows of a fine-tuning file. Such rows are never
                encoded in this process.
            limit_s: Longest time of a batch, after which its process is ended. 0 = no limit.
        """
        wanted = count_cores() if processes is None else max(1, processes)
        self._samples, self._limit_s = samples, limit_s
        self._tokenizer: Final = tokenizer
        self._processes: Final = min(wanted, _MOST_PROCESSES)
        self._threads_each: Final = -(-wanted // self._processes)
        self._children: Final[list[subprocess.Popen[bytes]]] = []
        self._mine: Final = threading.local()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        # Without a path to Python no process can be started, as in an embedded interpreter.
        if (self._processes > 1 or self._samples) and sys.executable:
            self._threads = ThreadPoolExecutor(self._processes, thread_name_prefix="meshwright-encode")
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            for child in self._children:
                # After an error nobody reads their answers, and they may be blocked writing them.
                child.kill()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for child in self._children:
            # Leaving it closes its pipes and waits.
            with contextlib.suppress(OSError), child:
                pass

    def map(self, batches: Iterable[Batch]) -> Iterator[list[bytes]]:
        """Yield the ids of every batch's texts in order, reading ahead by two batches per process."""
        if self._threads is None:
            for flags, texts in batches:
                yield self._tokenizer.encode_raw(texts, flags)
            return
        # Bounded, so a slow disk or consumer does not fill memory with encoded text.
        waiting: deque[Future[list[bytes]]] = deque()
        for batch in batches:
            waiting.append(self._threads.submit(self._ask, batch))
            if len(waiting) > 2 * self._processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _ask(self, batch: Batch) -> list[bytes]:
        """Encode a batch in the child process of this thread."""
        child = getattr(self._mine, "child", None) or self._start()
        assert child.stdin is not None and child.stdout is not None
        flags, texts = batch
        late = threading.Event()  # tells a process that was killed for its time from one that died
        with _limit_time(child, self._limit_s, late):
            with contextlib.suppress(BrokenPipeError):
                write_frame(child.stdin, [flags, *(text.encode() for text in texts)])
            answer = read_frame(child.stdout)
        if late.is_set():
            first_row = readable_location(json.loads(texts[0])[0])
            raise DataError(
                f"{first_row}: the chat template ran for more than {self._limit_s:g} s on {len(texts)} rows: it may "
                "never end; correct it"
            )
        if answer is None:
            raise DataError(
                f"an encoding process ended with exit code {child.wait()} (-9 = killed, often for want of memory): "
                "run again; fewer processes need less"
            )
        # The first part is empty if all went well.
        error, *ids = answer
        if error:
            raise DataError(error.decode() if self._samples else f"encoding failed: {error.decode()}")
        return ids

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _START, str(self._threads_each)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._children.append(child)
        self._mine.child = child
        assert child.stdin is not None
        # The path first: a caller may have changed it, and the child imports this package by it.
        child.stdin.write(json.dumps(sys.path).encode() + b"\n")
        setup = (self._tokenizer.json, str(self._tokenizer.vocab), self._samples)
        write_frame(child.stdin, [part.encode() for part in setup])
        return child


@contextlib.contextmanager
def _limit_time(child: subprocess.Popen[bytes], limit_s: float, late: threading.Event) -> Iterator[None]:
    """Give the child `limit_s` to answer, then kill it and set `late`. 0 = no limit."""

    def end() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(limit_s, end) if limit_s else None
    if timer is not None:
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
