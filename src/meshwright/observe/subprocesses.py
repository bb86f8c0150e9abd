"""Functions run in processes of their own, a few at a time: where what they leave behind in a process (process groups,
modes, settings) must not meet the next one, and where they must be able to be stopped.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from meshwright.observe.ranks import start
from meshwright.spec.errors import MeshwrightError


class TooLong(Exception):
    """The time was up before all had answered."""


def in_subprocesses(
    function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], *, processes: int = 0, limit_s: float | None = None
) -> Iterator[tuple[int, Any]]:
    """(number of a task, function(*task)) as they end; at most `processes` (0 = one for each core) at once.

    What a user can mend (MeshwrightError) is raised here as it was there, anything else as RuntimeError with its last
    line. TooLong after `limit_s`. All processes are gone when this ends, however it ends.
    """
    waiting = list(enumerate(tasks))[::-1]
    running: dict[Connection, tuple[int, Any]] = {}
    until = None if limit_s is None else time.monotonic() + limit_s
    workers = processes or len(os.sched_getaffinity(0))
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                number, task = waiting.pop()
                process, here = start(_serve, function, task)
                running[here] = number, process
            ready = wait(list(running), timeout=None if until is None else max(0.0, until - time.monotonic()))
            if not ready:
                raise TooLong
            for pipe in ready:
                assert isinstance(pipe, Connection)
                number, process = running.pop(pipe)
                yield number, _answer(pipe)
                process.join()
                pipe.close()
    finally:
        for pipe, (_, process) in running.items():
            process.kill()
            process.join()
            pipe.close()


def _serve(pipe: Connection, function: Callable[..., Any], task: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked ends this
    with suppress(BrokenPipeError):  # whoever asked was interrupted, and is not there any more
        try:
            pipe.send((True, function(*task)))
        except MeshwrightError as error:
            pipe.send((False, error))
        except BaseException as error:
            pipe.send((False, RuntimeError(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")))


def _answer(pipe: Connection) -> Any:
    try:
        done, found = pipe.recv()
    except EOFError:
        raise RuntimeError("a process of its own ended without an answer (out of memory?)") from None
    if not done:
        raise found
    return found
