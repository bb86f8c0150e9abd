"""Groups of processes whose contestants take turns step by step (parallel_speed.py)."""

import multiprocessing
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parallel_work import Contestant, Ours, OursPlayed, Played, Work
from benchmarks.picotron_peer import Picotron, checkout
from benchmarks.torch_peers import SCHEDULES, VIRTUAL, TorchDDP, TorchFSDP2, TorchPipeline, TorchTP
from meshwright import compat
from meshwright.parallel.groups.mesh import ProcessGroups

IDEAL = "one process"
WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One parallelism over `world` processes."""

    axis: str
    world: int
    work: Work
    schedules: tuple[str, ...] = ()
    patience: float = 1.0
    """Times the seconds of a group: pipelines have many contestants."""
    compile: str = "off"
    """As layout.compile; compiled blocks are set beside each other only."""

    @property
    def name(self) -> str:
        """What --groups calls it."""
        return f"{self.axis}-{self.world}{'' if self.compile == 'off' else '-compiled'}"

    def contests(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Name of a contest -> ours and its rivals."""
        if self.compile != "off":
            return {}
        if self.axis != "pp":
            rivals = {"dp": ("torch DDP", "picotron"), "zero3": ("torch FSDP2",), "tp": ("torch TP", "picotron")}
            return {f"{self.axis}-{self.world}": ("ours", rivals.get(self.axis, ("picotron",)))}
        return {
            f"pp-{self.world}-{name}": (
                f"ours {name}",
                (f"torch {SCHEDULES[name]}", *([f"picotron {name}"] if name in ("afab", "1f1b") else [])),
            )
            for name in self.schedules
        }


GROUPS = {
    group.name: group
    for group in (
        Group(axis="dp", world=2, work=Work()),
        Group(axis="zero3", world=2, work=Work()),
        Group(axis="tp", world=2, work=Work()),
        Group(axis="cp", world=2, work=Work(rows=1, sequence=1024)),
        Group(axis="pp", world=2, work=Work(micro_rows=2), schedules=tuple(SCHEDULES), patience=5),
        Group(axis="dp", world=4, work=Work()),
        Group(axis="zero3", world=4, work=Work()),
        Group(axis="tp", world=4, work=Work()),
        Group(axis="cp", world=4, work=Work(rows=1, sequence=1024)),
        Group(axis="pp", world=4, work=Work(micro_rows=1), schedules=("afab", "1f1b"), patience=1.5),
        Group(axis="pp", world=2, work=Work(micro_rows=2), schedules=("1f1b", "zb-h1", "zb-v"), compile="on"),
    )
}


class _Idle:
    """What the other ranks do while one process works alone."""

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Nothing."""
        return torch.zeros(())


def contestants(group: Group) -> dict[str, Callable[[], Contestant]]:
    """Everybody who takes part in a group, to be made on its ranks in this order."""
    work, world = group.work, group.world
    made: ProcessGroups = {}
    alone = dist.get_rank() == 0
    makers: dict[str, Callable[[], Contestant]] = {IDEAL: lambda: Ours(work) if alone else _Idle()}
    if group.axis == "dp":
        makers |= {"ours": lambda: Ours(work, made, dp_shard=world), "torch DDP": lambda: TorchDDP(work)}
    elif group.axis == "zero3":
        makers |= {"ours": lambda: Ours(work, made, dp_shard=world, zero=3), "torch FSDP2": lambda: TorchFSDP2(work)}
    elif group.axis == "tp":
        makers |= {"ours": lambda: Ours(work, made, tp=world), "torch TP": lambda: TorchTP(work)}
        makers["ours with sp"] = lambda: Ours(work, made, tp=world, sp=True)
    elif group.axis == "cp":
        makers["ours"] = lambda: Ours(work, made, cp=world)
        makers["ours, plain split"] = lambda: Ours(work, made, cp=world, context_split="chunks")
        makers["ours, all-gather"] = lambda: Ours(work, made, cp=world, context="all-gather")
    for name in group.schedules:
        layout = {"pp": world, "vp": VIRTUAL.get(name, 1), "schedule": name, "compile": group.compile}
        makers[f"ours {name}"] = partial(OursPlayed, work, made, **layout)
        if group.compile == "off":
            makers[f"torch {SCHEDULES[name]}"] = partial(TorchPipeline, work, name)
    if group.compile == "off" and checkout() is not None and group.axis != "zero3":
        for name in [name for name in group.schedules if name in ("afab", "1f1b")] or [""]:
            makers[f"picotron {name}".strip()] = partial(Picotron, work, group.axis, name)
    return makers


@dataclass(slots=True)
class Turn:
    """What one rank says of one step."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    loss: float = 0.0
    played: Played | None = None
    failure: str = ""


def serve(rank: int, group: Group, left_out: set[str], store: str, pipe: Connection) -> None:
    """One rank: makes its contestants, then takes the steps it is told to."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    compat.keep_freed_memory()
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=group.world, timeout=limit)
    ready: dict[str, Contestant] = {}
    for label, make in contestants(group).items():
        if label not in left_out:
            turn = Turn()
            try:
                ready[label] = make()
            except Exception:
                turn.failure = _last_line()
            pipe.send((label, turn))
            if turn.failure:
                return
    pipe.send(None)
    for label, step in iter(pipe.recv, None):
        batch = group.work.batch(step)
        try:
            with _all_cores(cores) if label == IDEAL and rank == 0 else nullcontext():
                dist.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                loss = ready[label].step(*batch)
                seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            pipe.send(Turn(seconds, cpu, loss.item(), getattr(ready[label], "played", None)))
        except Exception:
            pipe.send(Turn(failure=_last_line()))
            return


def _last_line() -> str:
    return traceback.format_exc().strip().splitlines()[-1][:200]


@contextmanager
def _all_cores(cores: list[int]) -> Iterator[None]:
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, here)


class Failure(Exception):
    """A contestant cannot take part: (label, why)."""


class Ranks:
    """The processes of a group."""

    def __init__(self, group: Group, left_out: set[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(group.world)]
        self.pipes = [here for here, _ in pipes]
        store = str(Path(self.folder.name, "store"))
        self.processes = [
            context.Process(target=serve, args=(rank, group, left_out, store, there), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, there in pipes:
            there.close()

    def labels(self) -> list[str]:
        """Waits until all contestants are made."""
        names = list[str]()
        while True:
            replies = [pipe.recv() for pipe in self.pipes]
            if replies[0] is None:
                return names
            for label, turn in replies:
                if turn.failure:
                    raise Failure(label, turn.failure)
            names.append(replies[0][0])

    def step(self, label: str, step: int) -> list[Turn]:
        """What each rank says of a step."""
        for pipe in self.pipes:
            pipe.send((label, step))
        turns: list[Turn] = [pipe.recv() for pipe in self.pipes]
        for turn in turns:
            if turn.failure:
                raise Failure(label, turn.failure)
        return turns

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


@dataclass(slots=True)
class Record:
    """One contestant's turns: seconds of the slowest rank, processor seconds of all ranks with all their threads,
    losses, and what its ranks played."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    played: list[list[Played]] = field(default_factory=list)


def take_turns(group: Group, seconds: float) -> tuple[dict[str, Record], dict[str, str]]:
    """Every contestant's record, and why some have none."""
    failed: dict[str, str] = {}
    while True:
        ranks = Ranks(group, set(failed))
        try:
            return _turns(ranks, seconds * group.patience), failed
        except (Failure, EOFError) as failure:
            if not isinstance(failure, Failure):
                raise
            label, why = failure.args
            if label.startswith("ours") or label == IDEAL:
                raise
            failed[label] = why
        finally:
            ranks.close()


def _turns(ranks: Ranks, seconds: float) -> dict[str, Record]:
    labels, dice = ranks.labels(), random.Random(0)
    records = {label: Record() for label in labels}
    begun = time.perf_counter()
    turn = 0
    while turn < WARM_UP + 5 or time.perf_counter() - begun < seconds:
        for label in dice.sample(labels, len(labels)):
            replies = ranks.step(label, turn)
            records[label].losses.append(sum(reply.loss for reply in replies))
            if turn < WARM_UP:
                continue
            records[label].seconds.append(max(reply.seconds for reply in replies))
            records[label].cpu_s.append(sum(reply.cpu_s for reply in replies))
            if replies[0].played is not None:
                records[label].played.append([reply.played for reply in replies if reply.played is not None])
        turn += 1
    return records
