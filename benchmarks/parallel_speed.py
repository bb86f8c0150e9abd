"""Training speed of every parallelism beside what others wrote for it, in one run.

    python -m benchmarks.parallel_speed [--json] [--seconds 30] [--groups dp-2 pp-2]
    python -m benchmarks.parallel_speed --tables FILE    # what --json printed, as the tables of docs/parallel_speed.md

A group is one parallelism over 2 or 4 Gloo processes, one torch thread each, pinned to the cores in turn. All its
contestants live in the same processes (same allocator, threads, process group) and take turns step by step in an order
that changes, from a barrier to the end of the slowest rank; a ratio is the median over the turns of the ratios within a
turn. So whatever else the machine does hits all alike. `ideal` is the same step by one process with as many threads as
there are cores. With 4 processes on 2 cores only ratios mean anything.

Who cannot take part: torch's own context parallelism, whose ring stands in for the flash and memory-efficient attention
of GPUs only (torch/distributed/tensor/experimental/_context_parallel); nanotron, whose parallel/context.py asserts
backend == "nccl".
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parallel_work import Contestant, Ours, OursPlayed, Played, Work
from benchmarks.picotron_peer import Picotron, checkout
from benchmarks.torch_peers import SCHEDULES, VIRTUAL, TorchDDP, TorchFSDP2, TorchPipeline, TorchTP
from meshwright import compat
from meshwright.spec.replay import Times, replay
from meshwright.spec.schedule import schedule

IDEAL = "one process"
WARM_UP = 2
SAME_LOSS = 1e-4
"""Contestants that start from the same weights must agree so well in their first losses; picotron has its own."""
SEEN = 3
"""Turns whose losses are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One parallelism over `world` processes."""

    axis: str
    world: int
    work: Work
    schedules: tuple[str, ...] = ()
    patience: float = 1.0
    """Times the seconds of a group: pipelines have many contestants."""

    def contests(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Name of a contest -> ours and its rivals."""
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
    f"{group.axis}-{group.world}": group
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
    )
}


class _Idle:
    """What the other ranks do while one process works alone."""

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Nothing."""
        return torch.zeros(())


def contestants(group: Group) -> dict[str, Callable[[], Contestant]]:
    """Everybody who takes part in a group, to be made on its ranks in this order."""
    work, world, made = group.work, group.world, {}
    alone = dist.get_rank() == 0
    found: dict[str, Callable[[], Contestant]] = {IDEAL: lambda: Ours(work) if alone else _Idle()}
    if group.axis == "dp":
        found |= {"ours": lambda: Ours(work, made, dp_shard=world), "torch DDP": lambda: TorchDDP(work)}
    elif group.axis == "zero3":
        found |= {"ours": lambda: Ours(work, made, dp_shard=world, zero=3), "torch FSDP2": lambda: TorchFSDP2(work)}
    elif group.axis == "tp":
        found |= {"ours": lambda: Ours(work, made, tp=world), "torch TP": lambda: TorchTP(work)}
        found["ours with sp"] = lambda: Ours(work, made, tp=world, sp=True)
    elif group.axis == "cp":
        found["ours"] = lambda: Ours(work, made, cp=world)
        found["ours, plain split"] = lambda: Ours(work, made, cp=world, zigzag=False)
        found["ours, all-gather"] = lambda: Ours(work, made, cp=world, context="all-gather")
    for name in group.schedules:
        layout = {"pp": world, "vp": VIRTUAL.get(name, 1), "schedule": name}
        found[f"ours {name}"] = lambda layout=layout: OursPlayed(work, made, **layout)  # type: ignore[misc]
        found[f"torch {SCHEDULES[name]}"] = lambda name=name: TorchPipeline(work, name)  # type: ignore[misc]
    if checkout() is not None and group.axis != "zero3":
        for name in [name for name in group.schedules if name in ("afab", "1f1b")] or [""]:
            found[f"picotron {name}".strip()] = lambda name=name: Picotron(work, group.axis, name)  # type: ignore[misc]
    return found


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
            with _all_cores(cores) if label == IDEAL and rank == 0 else _nothing():
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
def _nothing() -> Iterator[None]:
    yield


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
        found = []
        while True:
            said = [pipe.recv() for pipe in self.pipes]
            if said[0] is None:
                return found
            for label, turn in said:
                if turn.failure:
                    raise Failure(label, turn.failure)
            found.append(said[0][0])

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
            said = ranks.step(label, turn)
            records[label].losses.append(sum(one.loss for one in said))
            if turn < WARM_UP:
                continue
            records[label].seconds.append(max(one.seconds for one in said))
            records[label].cpu_s.append(sum(one.cpu_s for one in said))
            if said[0].played is not None:
                records[label].played.append([one.played for one in said if one.played is not None])
        turn += 1
    return records


def ratio(over: Record, under: Record) -> float:
    """The median over the turns of one's seconds over the other's."""
    return statistics.median(a / b for a, b in zip(over.seconds, under.seconds, strict=True))


def report(group: Group, seconds: float) -> dict[str, Any]:
    """Rows of all contestants, contests, and what the pipelines should have taken."""
    records, failed = take_turns(group, seconds)
    own = [record for label, record in records.items() if "picotron" not in label]
    spread = max(_spread([record.losses[turn] for record in own]) for turn in range(SEEN))
    assert spread < SAME_LOSS, f"losses differ by {spread}: {[(k, r.losses[:SEEN]) for k, r in records.items()]}"
    rows = {
        label: {
            "tokens_per_second": group.work.tokens / statistics.median(record.seconds),
            "step_s": statistics.median(record.seconds),
            "fastest_s": min(record.seconds),
            "cpu_s": statistics.median(record.cpu_s),
            "over_ideal": ratio(record, records[IDEAL]),
            "turns": len(record.seconds),
        }
        for label, record in records.items()
    }
    contests = {}
    for name, (ours, rivals) in group.contests().items():
        speeds = {rival: ratio(records[ours], records[rival]) for rival in rivals if rival in records}
        if not speeds:
            continue
        best = max(speeds, key=lambda rival: speeds[rival])
        contests[name] = {
            "best": best,
            "ours_over_best": 1 / speeds[best],
            "ours_over": {rival: 1 / speed for rival, speed in speeds.items()},
        }
    found: dict[str, Any] = {"rows": rows, "failed": failed, "loss_spread": spread, "contests": contests}
    if group.schedules:
        found["pipelines"] = pipelines(group, records)
    return found


def _spread(losses: list[float]) -> float:
    return (max(losses) - min(losses)) / max(losses)


def pipelines(group: Group, records: dict[str, Record]) -> dict[str, Any]:
    """Measured and simulated step of each of our schedules, beside those of 1f1b."""
    found: dict[str, Any] = {}
    walls = {
        name: [max(rank.wall_s for rank in ranks) for ranks in records[f"ours {name}"].played]
        for name in group.schedules
    }
    for name in group.schedules:
        times = durations([played for ranks in records[f"ours {name}"].played for played in ranks])
        lists = schedule(name, group.world, group.work.micro_batches, VIRTUAL.get(name, 1))
        simulated = replay(lists, times)
        wall = statistics.median(walls[name])
        found[name] = {
            "wall_s": wall,
            "simulated_s": simulated.total_s,
            "bubble": wall / max(simulated.busy_s) - 1,
            "simulated_bubble": simulated.bubble,
            "in_flight": simulated.in_flight,
        }
    for name, one in found.items():
        measured = statistics.median(a / b for a, b in zip(walls[name], walls["1f1b"], strict=True))
        should = one["simulated_s"] / found["1f1b"]["simulated_s"]
        one["over_1f1b"], one["simulated_over_1f1b"], one["off_simulated"] = measured, should, measured / should - 1
    return found


def durations(played: list[Played]) -> list[Times]:
    """Median processor seconds of each stage's passes. One that is never split counts as B alone."""
    taken: dict[tuple[str, int], list[float]] = {}
    for step in played:
        for kind, stage, _, seconds in step.actions:
            taken.setdefault((kind, stage), []).append(seconds)
    middle = {key: statistics.median(values) for key, values in taken.items()}
    stages = 1 + max(stage for _, stage in taken)
    times = []
    for stage in range(stages):
        whole, weight = middle.get(("BW", stage)), middle.get(("W", stage), 0.0)
        given = middle.get(("B", stage))
        if given is None:
            given = (whole or 0.0) - weight
        times.append(Times(forward_s=middle["F", stage], input_s=given, weight_s=weight))
    return times


def summary(groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the claims read: the lowest ratio of each group over all its contests."""
    least = {
        name: min(contest["ours_over_best"] for contest in found["contests"].values())
        for name, found in groups.items()
        if found["contests"]
    }
    return {
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "least": least,
        "groups": groups,
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a group of a few contestants")
    parser.add_argument(
        "--tables", type=Path, metavar="FILE", help="print a --json document as tables, measure nothing"
    )
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    given = parser.parse_args()
    if given.tables:
        print("\n".join(tables(json.loads(given.tables.read_text())["groups"])))
        return
    groups = {}
    for name in given.groups:
        groups[name] = report(GROUPS[name], given.seconds)
        with contextlib.redirect_stdout(sys.stderr) if given.json else _nothing():
            show(name, groups[name])
    if checkout() is None:
        print("picotron was left out: no checkout at $PICOTRON", file=sys.stderr)
    if given.json:
        print(json.dumps(summary(groups)))


def tables(groups: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Lines of markdown: every contestant, then our schedules measured and simulated."""
    yield "| group | contestant | tokens/s | over ideal | processor time | ours over it |"
    yield "|---|---|---|---|---|---|"
    for name, found in groups.items():
        over = {rival: value for contest in found["contests"].values() for rival, value in contest["ours_over"].items()}
        for label, row in found["rows"].items():
            ratio_cell = f"{over[label]:.2f} x" if label in over else ""
            yield (
                f"| {name} | {label} | {row['tokens_per_second']:.0f} | {row['over_ideal']:.2f} x "
                f"| {row['cpu_s'] * 1e3:.0f} ms | {ratio_cell} |"
            )
    yield ""
    yield "| group | schedule | passes | simulated | bubble | simulated | over 1f1b | simulated |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, found in groups.items():
        for schedule_name, one in found.get("pipelines", {}).items():
            yield (
                f"| {name} | {schedule_name} | {one['wall_s'] * 1e3:.0f} ms | {one['simulated_s'] * 1e3:.0f} ms "
                f"| {one['bubble']:.0%} | {one['simulated_bubble']:.0%} | {one['over_1f1b']:.3f} "
                f"| {one['simulated_over_1f1b']:.3f} |"
            )


def show(name: str, found: dict[str, Any]) -> None:
    """For people."""
    print(f"\n{name}")
    for label, row in found["rows"].items():
        print(
            f"  {label:38}{row['tokens_per_second']:8.0f} tokens/s {row['step_s'] * 1e3:7.0f} ms "
            f"{row['over_ideal']:6.2f} x ideal, {row['cpu_s'] * 1e3:6.0f} ms of processors  ({row['turns']} turns)"
        )
    for label, why in found["failed"].items():
        print(f"  {label:38}does not run: {why}")
    for contest, one in found["contests"].items():
        over = ", ".join(f"{value:.3f} x {rival}" for rival, value in one["ours_over"].items())
        print(f"  {contest:20} speed of ours: {over}")
    for schedule_name, one in found.get("pipelines", {}).items():
        print(
            f"  {schedule_name:12} {one['wall_s'] * 1e3:6.0f} ms, simulated {one['simulated_s'] * 1e3:6.0f}; bubble "
            f"{one['bubble']:6.1%}, simulated {one['simulated_bubble']:6.1%}; over 1f1b {one['over_1f1b']:.3f}, "
            f"simulated {one['simulated_over_1f1b']:.3f}"
        )


if __name__ == "__main__":
    main()
