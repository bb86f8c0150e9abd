"""How long a step waits for a checkpoint: written at once, or by a thread while training goes on.

    python -m benchmarks.saving [--json] [--model llama-100m] [--ranks 1 2] [--saves 3] [--store]

A model with its optimizer (fp32: weights and two moments, 12 bytes a parameter) is trained on short random sequences by
real Gloo processes of one thread each (ZeRO-1 from two on), and saved again and again, four steps apart. `blocked` is
what the step loop waited for one save: the first, which takes the memory for the copy, and the median of the others.
`cpu` is the processor time of that wait in the thread that steps, which other processes on the machine change little.
`step` is the median step, while no save is under way and while one is. Writing is hashed and on disk (fsync) before a
checkpoint counts, either way. `--store` adds asynchronous saves that are uploaded to an object store on this machine
(needs the extra `drill`). The server shares the processor with the steps, as a real one does not. So uploads are slowed
down to UPLOAD_MBS: one is always under way, and takes little of the processor.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright import compat
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.groups.mesh import saving_group
from meshwright.remote.locations import Location
from meshwright.spec import Layout, Recipe, presets
from meshwright.spec.plan.plan import Store
from meshwright.store.mirror import RECORDS, Mirror
from meshwright.store.owner import Ownership
from meshwright.store.saver import Saver
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.step.batches import Batch, split
from meshwright.training.step.state import Progress, TrainState
from meshwright.training.step.step import train_step
from meshwright.verbs.drill import object_store

TOKENS = 32
"""Of the one sequence that a rank trains on in a step: what is measured does not depend on it."""
STEPS_BETWEEN = 4
UPLOAD_MBS = 30.0
"""Limit of uploads in MB/s, all ranks together."""


@dataclass(slots=True)
class Times:
    """Seconds, on one rank."""

    blocked: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    """Processor time of the thread that steps, in each save."""
    quiet: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)


def new_state(model: str, ranks: int) -> TrainState:
    """A fresh model and optimizer."""
    layout = Layout(compile="off", dp_shard=ranks, zero=1 if ranks > 1 else 0)
    engine = build_engine(presets.model(model), layout, mesh=make_mesh(layout), device=torch.device("cpu"), seed=0)
    return TrainState(engine, Optimizer(engine.parameters.items(), Recipe()), None, Progress())


def on_rank(model: str, ranks: int, saves: int, way: str, folder: str, environment: Mapping[str, str]) -> Times:
    """One process: steps, and a save after every few of them."""
    compat.keep_freed_memory()
    os.environ.update(environment)
    state, times = new_state(model, ranks), Times()
    mesh = state.engine.mesh
    group = None if way == "sync" else saving_group(mesh)
    store = Store(url=f"s3://{object_store.BUCKET}/{ranks}", bandwidth=UPLOAD_MBS) if way == "store" else None
    mirror = Mirror(store, Ownership(Location.open(store.url)), rank=mesh.rank, writers=ranks) if store else None
    tokens = torch.randint(0, state.engine.model.shape.vocab, (1, TOKENS))
    batch = Batch(tokens=tokens, targets=tokens, valid=TOKENS, valid_of_rows=(TOKENS,))
    saving = Saver(Path(folder), keep_last=1, group=group, saved=lambda step, path: None, mirror=mirror)
    with saving as saver:
        for number in range((saves + 1) * STEPS_BETWEEN):
            under_way = saver.busy
            started = time.perf_counter()
            train_step(state.engine, state.optimizer, split(batch, 1), rate=1e-4, clip=1.0, balance_loss=0.0)
            if number:
                (times.beside if under_way else times.quiet).append(time.perf_counter() - started)
            if number % STEPS_BETWEEN == STEPS_BETWEEN - 1 and len(times.blocked) < saves:
                before, processor = saver.blocked_s, time.thread_time()
                saver.save(number + 1, state.tensors(), {"step": number + 1}, None)
                times.processor.append(time.thread_time() - processor)
                times.blocked.append(saver.blocked_s - before)
    return times


def case(model: str, ranks: int, saves: int, way: str) -> dict[str, Any]:
    """One row: the rank that waited longest counts."""
    with ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {}
        if way == "store":
            environment = object_store.client_environment(stack.enter_context(object_store.serve())[0])
            for name in RECORDS:  # which every upload takes along
                (run / name).touch()
        folder = run / "checkpoints"
        times = on_ranks(ranks, on_rank, model, ranks, saves, way, str(folder), environment, limit_s=900)
        written = max(folder.glob("step-*"))
        size_bytes = sum(path.stat().st_size for path in written.iterdir())
    blocked = [max(save) for save in zip(*(rank.blocked for rank in times), strict=True)]
    processor = [max(save) for save in zip(*(rank.processor for rank in times), strict=True)]
    return {
        "ranks": ranks,
        "way": way,
        "checkpoint_bytes": size_bytes,
        "first_blocked_seconds": blocked[0],
        "blocked_seconds": statistics.median(blocked[1:] or blocked),
        "blocked_cpu_seconds": statistics.median(processor[1:] or processor),
        "step_seconds": statistics.median(times[0].quiet),
        "step_beside_seconds": statistics.median(times[0].beside) if times[0].beside else None,
    }


def measure(model: str, sizes: list[int], saves: int, stored: bool) -> dict[str, Any]:
    """All rows; `blocked_share` is the largest part of a save's time that steps still wait when it is asynchronous."""
    ways = ("sync", "async", *(["store"] if stored else []))
    rows = [case(model, ranks, saves, way) for ranks in sizes for way in ways]
    blocked = {(row["ranks"], row["way"]): row["blocked_seconds"] for row in rows}
    shares = [blocked[ranks, "async"] / blocked[ranks, "sync"] for ranks in sizes]
    return {"model": model, "rows": rows, "blocked_share": max(shares)}


def main() -> None:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="llama-100m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--store", action="store_true", help="also with uploads to an object store on this machine")
    options = parser.parse_args()
    result = measure(options.model, options.ranks, options.saves, options.store)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{'ranks':>5}  {'way':<6}{'MB':>7}{'first s':>9}{'blocked s':>11}{'cpu s':>8}{'step s':>8}{'beside s':>10}")
    for row in result["rows"]:
        beside = "" if row["step_beside_seconds"] is None else f"{row['step_beside_seconds']:.2f}"
        print(
            f"{row['ranks']:>5}  {row['way']:<6}{row['checkpoint_bytes'] / 1e6:>7.0f}"
            f"{row['first_blocked_seconds']:>9.2f}{row['blocked_seconds']:>11.2f}"
            f"{row['blocked_cpu_seconds']:>8.3f}{row['step_seconds']:>8.2f}{beside:>10}"
        )


if __name__ == "__main__":
    main()
