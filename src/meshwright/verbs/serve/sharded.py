"""An engine over several ranks, each of which reads its own part of the weights.

The ranks are processes of this machine that are started here, or those that torchrun has started.
"""

import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.formats.hub.adapter import base_folder, is_adapter
from meshwright.formats.quantized.detection import is_quantized
from meshwright.interface.answers.answer import Place, folder_of
from meshwright.interface.trained.opening import Allocate, Put, described, opened
from meshwright.interface.trained.trained_model import TrainedModel
from meshwright.model import Transformer
from meshwright.observe.ranks import start
from meshwright.parallel import Mesh, build_engine, make_mesh
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.serving_ranks import RankCommand, ServingRanks
from meshwright.serving.engine.runner import follow
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec import Layout, Recipe
from meshwright.spec.errors import ArgumentError, IllegalLayout, MeshwrightError, RunError, argument
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.rules.legal import layout_violations
from meshwright.store.run_folder import LAST
from meshwright.training.device import pick_device

NEVER = timedelta(days=3650)
"""Timeout of a rank that waits for the next step.

A server may be idle for long, and a rank that ends closes its connections.
"""
MEET_S, POLL_S = 300.0, 0.02
"""Seconds for the slowest rank to import torch; between checks whether it is there."""
LAST_WORD_S = 2.0
"""Seconds for a rank to report why it ends."""
MOST_LETTERS = 500
"""Longest report of such a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    path: Path
    dtype: str | None
    checkpoint: str
    layout: Layout
    store: str = ""
    """File at which ranks started here meet."""
    threads: int = 1


@contextmanager
def sharded_engine(
    path: Place, options: EngineOptions | None = None, *, tp: int, ep: int = 1, dtype: str | None = "auto",
    checkpoint: str = LAST, adapters: Mapping[str, str | Path] | None = None,
) -> Iterator[ServingEngine | None]:  # fmt: skip
    """Open an engine of a trained model over `tp` ranks, with experts spread over `ep` of them.

    Outside a process group, tp - 1 processes of this machine are started, and end with the context. In a group of tp
    ranks (torchrun) every rank enters: the first gets the engine, the others get None once the first has left.

    Args:
        path: As for `load`, and so are `dtype` and `checkpoint`.
        options: Options of the engine. Bytes are those of each rank.
        tp: Ranks that share every layer.
        ep: Ranks that experts are spread over, each expert whole.
        dtype: As for `load`.
        checkpoint: As for `load`.
        adapters: As for TrainedModel.engine. The first rank reads them.

    Raises:
        ArgumentError, IllegalLayout, RunError: And all that `load` raises.
    """
    with sharded_model(path, tp=tp, ep=ep, dtype=dtype, checkpoint=checkpoint) as first_rank:
        yield None if first_rank is None else first_rank.engine(options, adapters=adapters)


@contextmanager
def sharded_model(
    path: Place, *, tp: int, ep: int = 1, dtype: str | None = "auto", checkpoint: str = LAST
) -> Iterator[TrainedModel | None]:
    """Open the first rank's part of a model, for an engine only; None on other ranks. As `sharded_engine`."""
    task = _Task(path=folder_of(path, checkpoint), dtype=dtype, checkpoint=checkpoint, layout=_layout(tp, ep))
    _check(task)
    if dist.is_initialized():
        if dist.get_world_size() != tp:
            raise ArgumentError(
                "tp", tp, remedy=f"the process group has {dist.get_world_size()} ranks, and all of them serve"
            )
        with _rank_part(task) as part:
            yield part
        return
    with _with_processes(task) as part:
        yield part


def _layout(tp: int, ep: int) -> Layout:
    if tp < 2 or ep < 1:
        raise ArgumentError(
            "tp", tp, f"{argument('ep', ep)}", "tp must be at least 2, ep at least 1; for one rank use load().engine()"
        )
    return Layout(tp=tp, ep=ep, sp=ep > 1, compile="off")


def _check(task: _Task) -> None:
    """Check all that can be checked before a process is started."""
    if is_quantized(task.path):
        raise ArgumentError("tp", sentence=f"quantized weights cannot be split over ranks: take {argument('tp', 1)}")
    path, layout = base_folder(task.path) if is_adapter(task.path) else task.path, task.layout
    shape = described(path, task.checkpoint).model.shape
    refused = layout_violations(shape, Recipe(sequence=layout.tp), layout)
    if refused:
        # The caller gave tp and ep as arguments, not as keys of a plan.
        raise IllegalLayout(refused[0].replace("layout.", ""))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and layout.tp > gpus:
        raise ArgumentError("tp", layout.tp, remedy=f"this machine has {gpus} GPUs, of which each rank takes one")


@contextmanager
def _with_processes(task: _Task) -> Iterator[TrainedModel]:
    """Start processes of this machine as the other ranks."""
    before = torch.get_num_threads()
    # The ranks share the cores of this machine.
    threads = max(1, before // task.layout.tp)
    with tempfile.TemporaryDirectory() as folder:
        task = replace(task, store=str(Path(folder, "store")), threads=threads)
        others = [start(_serve_rank, _follow_task, task, rank) for rank in range(1, task.layout.tp)]
        try:
            torch.set_num_threads(threads)
            # Rank 0 watches the others while it waits, so a rank that fails to start is reported at once.
            _meet(task, 0, [process for process, _ in others])
            with _rank_part(task) as part:
                assert part is not None and part.ranks is not None
                ends = [process.sentinel for process, _ in others]
                # An idle server sends nothing, so only the end of a process tells that its rank is gone.
                threading.Thread(target=_watch, args=(ends, part.ranks), daemon=True).start()
                yield part
            for process, _ in others:
                process.join(LAST_WORD_S)
        except RunError as error:
            # A rank that ended may have reported why; here only its connection is lost.
            last_words = _last_words([pipe for _, pipe in others])
            raise error.reworded(after=f" ({last_words})" if last_words else "") from error
        finally:
            torch.set_num_threads(before)
            for process, pipe in others:
                # A rank has nothing to save, and one inside a collective must not delay the end.
                process.kill()
                process.join()
                pipe.close()
            if dist.is_initialized():
                dist.destroy_process_group()


def _watch(ends: list[int], ranks: ServingRanks) -> None:
    """Mark the ranks as broken at once when a process ends, even if nobody uses them."""
    wait(ends)
    ranks.broken = True


@contextmanager
def _rank_part(task: _Task) -> Iterator[TrainedModel | None]:
    """Open this rank's part. Other ranks follow the first one, which tells them when to end."""
    mesh = make_mesh(task.layout)
    part = opened(task.path, task.dtype, task.checkpoint, _allocate_part(mesh))
    ranks = ServingRanks(mesh, part.model)
    if not ranks.leads:
        follow(part.model, ranks)
        yield None
        return
    try:
        yield replace(part, ranks=ranks)
    finally:
        if not ranks.broken:
            with suppress(RunError):  # a rank that is gone needs no END
                ranks.send(RankCommand.END)


def _allocate_part(mesh: Mesh) -> Allocate:
    """Return an allocator of this rank's part, which stores its boxes of each weight."""

    def allocate(shape: ModelShape, dtype: torch.dtype) -> tuple[Transformer, Put]:
        device = pick_device()
        engine = build_engine(shape, mesh.layout, mesh=mesh, device=device, dtype=dtype, initialize=False, trains=False)
        parameters, boxes = engine.model.state_dict(), engine.boxes

        def put(name: str, tensor: Tensor) -> None:
            parameters[name].copy_(tensor[boxes[name].slices] if name in boxes else tensor)

        return engine.model, put

    return allocate


def _meet(task: _Task, rank: int, others: list[Any]) -> None:
    """Make the process group once all ranks are there. Raises RunError if one has ended."""
    # A file needs no port, which another program could take between the choice and its use.
    store = dist.FileStore(task.store, task.layout.tp)
    store.set_timeout(NEVER)
    # init_process_group would wait for a missing rank until its timeout, which is ten years here.
    store.set(f"here/{rank}", "")
    end = time.monotonic() + MEET_S
    while not store.check([f"here/{other}" for other in range(task.layout.tp)]):
        if any(not process.is_alive() for process in others) or time.monotonic() > end:
            raise RunError(f"one of {task.layout.tp} ranks could not be started")
        time.sleep(POLL_S)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=rank, world_size=task.layout.tp, timeout=NEVER
    )


def _serve_rank(pipe: Connection, function: Any, task: _Task, rank: int) -> None:
    """Run one rank in its own process. Ctrl-C is handled by the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        function(task, rank)
    except Exception as error:
        is_expected = isinstance(error, MeshwrightError)
        if not is_expected:
            traceback.print_exc()
        with suppress(OSError):
            reason = " ".join((str(error) if is_expected else f"{type(error).__name__}: {error}").split())
            pipe.send_bytes(f"rank {rank}: {reason[:MOST_LETTERS]}".encode())
        raise SystemExit(1) from None


def _follow_task(task: _Task, rank: int) -> None:
    torch.set_num_threads(task.threads)
    _meet(task, rank, [])
    with _rank_part(task):
        pass


def _last_words(pipes: list[Connection]) -> str:
    for pipe in pipes:
        with suppress(EOFError, OSError):
            if pipe.poll(LAST_WORD_S):
                return pipe.recv_bytes().decode()
    return ""
