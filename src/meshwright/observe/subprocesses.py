"""Functions run in their own processes, a few at a time.

Use it where a function leaves state behind (process groups, modes, settings) that must not meet the next one, or where
it must be possible to stop it.
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
    """The time limit passed before all tasks had answered."""


def in_subprocesses(
    function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], *, processes: int = 0, limit_s: float | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield (number of a task, function(*task)) as tasks end.

    Raises a MeshwrightError as the task raised it, any other exception as RuntimeError with its last line, and TooLong
    after `limit_s`. All processes have ended when the generator ends, for whatever reason.

    Args:
        processes: Largest number at once. 0 = one per core.
    """
    waiting = list(enumerate(tasks))[::-1]  # taken from the end, so in order
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends this process
    with suppress(BrokenPipeError):  # the caller was interrupted and has ended
        try:
            pipe.send((True, function(*task)))
        except MeshwrightError as error:
            pipe.send((False, error))
        except BaseException as error:
            pipe.send((False, RuntimeError(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")))


def _answer(pipe: Connection) -> Any:
    try:
        done, answer = pipe.recv()
    except EOFError:
        raise RuntimeError("a subprocess ended without an answer (out of memory?)") from None
    if not done:
        raise answer
    return answer
