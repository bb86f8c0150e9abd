"""Training speed of every parallelism beside what others wrote for it, in one run.

    python -m benchmarks.parallel_speed [--json] [--seconds 30] [--groups dp-2 pp-2]
    python -m benchmarks.parallel_speed --tables FILE    # what --json printed, as the tables of docs/parallel_speed.md

A group is one parallelism over 2 or 4 Gloo processes, one torch thread each, pinned to the cores in turn. All its
contestants live in the same processes (same allocator, threads, process group) and take turns step by step in an order
that changes, from a barrier to the end of the slowest rank; a ratio is the median over the turns of the ratios within a
turn. So whatever else the machine does hits all alike. `ideal` is the same step by one process with as many threads as
there are cores. With 4 processes on 2 cores only ratios mean anything.

Who cannot take part: torch's own context parallelism, whose ring stands in for the flash and memory-efficient attention
of GPUs only (torch/distributed/tensor/experimental/_context_parallel); nanotron, whose parallel/axes/context.py asserts
backend == "nccl".
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel_turns import GROUPS, IDEAL, Group, Record, take_turns
from benchmarks.parallel_work import Played
from benchmarks.picotron_peer import checkout
from benchmarks.torch_peers import VIRTUAL
from meshwright.spec.layout.replay import Times, replay
from meshwright.spec.layout.schedule import schedule

SAME_LOSS = 1e-4
"""Contestants that start from the same weights must agree so well in their first losses; picotron has its own."""
SEEN = 3
"""Turns whose losses are compared."""


def ratio(over: Record, under: Record) -> float:
    """The median over the turns of one's seconds over the other's."""
    return statistics.median(a / b for a, b in zip(over.seconds, under.seconds, strict=True))


def report(group: Group, seconds: float) -> dict[str, Any]:
    """Rows of all contestants, contests, and what the pipelines should have taken."""
    records, failed = take_turns(group, seconds)
    ours_and_torch = [record for label, record in records.items() if "picotron" not in label]
    spread = max(_spread([record.losses[turn] for record in ours_and_torch]) for turn in range(SEEN))
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
    figures: dict[str, Any] = {"rows": rows, "failed": failed, "loss_spread": spread, "contests": contests}
    if group.schedules:
        figures["pipelines"] = pipelines(group, records)
    return figures


def _spread(losses: list[float]) -> float:
    return (max(losses) - min(losses)) / max(losses)


def pipelines(group: Group, records: dict[str, Record]) -> dict[str, Any]:
    """Measured and simulated step of each of our schedules, beside those of 1f1b."""
    schedules: dict[str, Any] = {}
    walls = {
        name: [max(rank.wall_s for rank in ranks) for ranks in records[f"ours {name}"].played]
        for name in group.schedules
    }
    for name in group.schedules:
        times = durations([played for ranks in records[f"ours {name}"].played for played in ranks])
        lists = schedule(name, group.world, group.work.micro_batches, VIRTUAL.get(name, 1))
        simulated = replay(lists, times)
        wall = statistics.median(walls[name])
        schedules[name] = {
            "wall_s": wall,
            "simulated_s": simulated.total_s,
            "bubble": wall / max(simulated.busy_s) - 1,
            "simulated_bubble": simulated.bubble,
            "in_flight": simulated.in_flight,
        }
    for name, timing in schedules.items():
        measured = statistics.median(a / b for a, b in zip(walls[name], walls["1f1b"], strict=True))
        should = timing["simulated_s"] / schedules["1f1b"]["simulated_s"]
        timing["over_1f1b"], timing["simulated_over_1f1b"], timing["off_simulated"] = (
            measured,
            should,
            measured / should - 1,
        )
    return schedules


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
        input_seconds = middle.get(("B", stage))
        if input_seconds is None:
            input_seconds = (whole or 0.0) - weight
        times.append(Times(forward_s=middle["F", stage], input_s=input_seconds, weight_s=weight))
    return times


def summary(groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the claims read: the lowest ratio of each group over all its contests."""
    least = {
        name: min(contest["ours_over_best"] for contest in figures["contests"].values())
        for name, figures in groups.items()
        if figures["contests"]
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
    eager = [name for name, group in GROUPS.items() if group.compile == "off"]
    parser.add_argument("--groups", nargs="+", default=eager, choices=list(GROUPS))
    options = parser.parse_args()
    if options.tables:
        print("\n".join(tables(json.loads(options.tables.read_text())["groups"])))
        return
    groups = {}
    for name in options.groups:
        groups[name] = report(GROUPS[name], options.seconds)
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            show(name, groups[name])
    if checkout() is None:
        print("picotron was left out: no checkout at $PICOTRON", file=sys.stderr)
    if options.json:
        print(json.dumps(summary(groups)))


def tables(groups: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Lines of markdown: every contestant, then our schedules measured and simulated."""
    yield "| group | contestant | tokens/s | over ideal | processor time | ours over it |"
    yield "|---|---|---|---|---|---|"
    for name, figures in groups.items():
        over = {
            rival: value for contest in figures["contests"].values() for rival, value in contest["ours_over"].items()
        }
        for label, row in figures["rows"].items():
            ratio_cell = f"{over[label]:.2f} x" if label in over else ""
            yield (
                f"| {name} | {label} | {row['tokens_per_second']:.0f} | {row['over_ideal']:.2f} x "
                f"| {row['cpu_s'] * 1e3:.0f} ms | {ratio_cell} |"
            )
    yield ""
    yield "| group | schedule | passes | simulated | bubble | simulated | over 1f1b | simulated |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, figures in groups.items():
        for schedule_name, timing in figures.get("pipelines", {}).items():
            yield (
                f"| {name} | {schedule_name} | {timing['wall_s'] * 1e3:.0f} ms | {timing['simulated_s'] * 1e3:.0f} ms "
                f"| {100 * timing['bubble']:.0f} % | {100 * timing['simulated_bubble']:.0f} % "
                f"| {timing['over_1f1b']:.3f} | {timing['simulated_over_1f1b']:.3f} |"
            )


def show(name: str, figures: dict[str, Any]) -> None:
    """For people."""
    print(f"\n{name}")
    for label, row in figures["rows"].items():
        print(
            f"  {label:38}{row['tokens_per_second']:8.0f} tokens/s {row['step_s'] * 1e3:7.0f} ms "
            f"{row['over_ideal']:6.2f} x ideal, {row['cpu_s'] * 1e3:6.0f} ms of processors  ({row['turns']} turns)"
        )
    for label, why in figures["failed"].items():
        print(f"  {label:38}does not run: {why}")
    for contest, contestants in figures["contests"].items():
        over = ", ".join(f"{value:.3f} x {rival}" for rival, value in contestants["ours_over"].items())
        print(f"  {contest:20} speed of ours: {over}")
    for schedule_name, timing in figures.get("pipelines", {}).items():
        print(
            f"  {schedule_name:12} {timing['wall_s'] * 1e3:6.0f} ms, simulated {timing['simulated_s'] * 1e3:6.0f}; "
            f"bubble {timing['bubble']:6.1%}, simulated {timing['simulated_bubble']:6.1%}; "
            f"over 1f1b {timing['over_1f1b']:.3f}, simulated {timing['simulated_over_1f1b']:.3f}"
        )


if __name__ == "__main__":
    main()
