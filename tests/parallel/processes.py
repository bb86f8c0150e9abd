"""Real Gloo processes for tests: started once, used again and again.

    results = on_ranks(4, check_something, argument, ...)

runs the module-level function on ranks 0 .. 3 of a fresh process group and gives what each returned, or raises what
the first one raised, with its traceback. Workers are spawned (one torch thread each) and live as long as pytest does.
"""

import atexit
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT_S = 120
_workers: list[tuple[Any, Connection]] = []


class RankError(AssertionError):
    """What a rank raised."""


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """The result of function(*arguments) on each rank of a new Gloo group of `world` processes."""
    while len(_workers) < world:
        _workers.append(_start())
    with tempfile.TemporaryDirectory() as folder:
        for rank, (_, pipe) in enumerate(_workers[:world]):
            pipe.send((function, arguments, rank, world, str(Path(folder, "store")), limit_s))
        results: dict[int, Any] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(_workers[:world])}
        while pipes:
            ready = wait(list(pipes), timeout=limit_s)
            if not ready:
                _stop()
                raise RankError(f"ranks {sorted(pipes.values())} of {world} did not answer within {limit_s:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    failed, results[rank] = pipe.recv()
                except EOFError:
                    failed, results[rank] = True, "the process ended"
                if failed:
                    _stop()
                    raise RankError(f"rank {rank} of {world}:\n{results[rank]}")
    return [results[rank] for rank in range(world)]


def _start() -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def _stop() -> None:
    for process, pipe in _workers:
        process.kill()
        process.join()
        pipe.close()
    _workers.clear()


atexit.register(_stop)


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, rank, world, store, limit_s = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=limit_s)
            )
            torch.manual_seed(0)
            pipe.send((False, function(*arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
