"""Processes of this machine as ranks of a process group, to try a layout without a launcher.

    results = on_ranks(4, check_something, argument, ...)

runs the module-level function on ranks 0 .. 3 of a fresh process group. It returns the result of each rank, or raises
the first error with its traceback. Every call starts new processes, forked from a server that has imported torch:
torch names groups by their ranks, so a dying group would take a new one of the same name with it.

`in_subprocesses` runs functions in their own processes without a group, a few at a time: where a function leaves state
behind (process groups, modes, settings), or where it must be possible to stop it.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.spec.errors import MeshwrightError

LIMIT_S = 120
"""Seconds without any answer after which ranks are given up."""
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "meshwright.training.loop"]
)


def start_server() -> None:
    """Start the server that forks processes, on the main thread only.

    It ignores Ctrl-C, because an interrupted import would print a traceback. Whoever started it ends the forked
    processes.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    # A child inherits ignored signals, so the server is started while this process ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def main_unread(function: Callable[..., Any]) -> Iterator[None]:
    """Hide the caller's main script from processes that start inside.

    They need not run it to find a function of this package. A script or notebook without `if __name__ == "__main__"`
    can therefore start some too.
    """
    main = sys.modules["__main__"]
    if function.__module__ != "__main__":
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class RankError(AssertionError):
    """An exception raised on a rank."""


def on_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S, device: str = "cpu"
) -> list[Any]:
    """Return function(*arguments) of each rank of a new group (Gloo on a CPU, NCCL with one GPU per rank on cuda)."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = _Rendezvous(world, str(Path(folder, "store")), limit_s, device)
        started = [start(_serve, function, arguments, rank, rendezvous) for rank in range(world)]
        try:
            return _collect({pipe: rank for rank, (_, pipe) in enumerate(started)}, limit_s)
        finally:
            for process, pipe in started:
                process.kill()
                process.join()
                pipe.close()


def _collect(pipes: dict[Connection, int], limit_s: float) -> list[Any]:
    world, results = len(pipes), {}
    while pipes:
        ready = wait(list(pipes), timeout=limit_s)
        if not ready:
            raise RankError(f"ranks {sorted(pipes.values())} of {world} did not answer within {limit_s:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            try:
                failed, results[rank] = pipe.recv()
                # Tensors come as shared memory: their sender must outlive the reading.
                if not failed:
                    pipe.send(None)
            except EOFError:
                failed, results[rank] = True, "the process ended"
            if failed:
                raise RankError(f"rank {rank} of {world}:\n{results[rank]}")
    return [results[rank] for rank in range(world)]


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    """Address and limits of one group of ranks."""

    world: int
    store: str
    limit_s: float
    device: str


def start(serve: Callable[..., None], function: Callable[..., Any], *arguments: Any) -> tuple[Any, Connection]:
    """Start a process that runs serve(pipe, function, *arguments). Return it and this end of the pipe."""
    start_server()
    pipe, child_pipe = SERVER.Pipe()
    process = SERVER.Process(target=serve, args=(child_pipe, function, *arguments), daemon=True)
    with main_unread(function):
        process.start()
    # Only the child may hold its end: else its death would not end the pipe, and a reader would wait forever.
    child_pipe.close()
    return process, pipe


def _serve(pipe: Connection, function: Any, arguments: Any, rank: int, rendezvous: _Rendezvous) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        backend = "gloo"
        if rendezvous.device == "cuda":
            torch.cuda.set_device(rank)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous.store}",
            rank=rank,
            world_size=rendezvous.world,
            timeout=timedelta(seconds=rendezvous.limit_s),
        )
        torch.manual_seed(0)
        pipe.send((False, function(*arguments)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
        return
    pipe.recv()
    # The caller has all answers by now, and may have ended other ranks.
    with suppress(RuntimeError):
        dist.barrier()
        dist.destroy_process_group()


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
    # Reversed, since tasks are taken from the end.
    waiting = list(enumerate(tasks))[::-1]
    running: dict[Connection, tuple[int, Any]] = {}
    until = None if limit_s is None else time.monotonic() + limit_s
    workers = processes or len(os.sched_getaffinity(0))
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                number, task = waiting.pop()
                process, pipe_of_task = start(_serve_task, function, task)
                running[pipe_of_task] = number, process
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


def _serve_task(pipe: Connection, function: Callable[..., Any], task: tuple[Any, ...]) -> None:
    # Ctrl-C reaches all processes of a terminal. The caller ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The pipe breaks when the caller was interrupted and has ended.
    with suppress(BrokenPipeError):
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
