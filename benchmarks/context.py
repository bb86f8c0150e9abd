"""Attention with its gradients over context-parallel ranks: zig-zag, striped or plain chunks, by ring or gather.

    python -m benchmarks.context [--json] [--ranks 2 4] [--sequence 4096]

Real Gloo processes of one torch thread each, causal attention in fp32. `wall` is from a barrier to the last rank's end,
`cpu` what the busiest rank used on all its threads, `even` the mean rank's share of that (1 = all have the same work).
With more processes than cores the wall time means nothing; processor time still does.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import compat
from meshwright.kernels.attention.attend import Mask, attend
from meshwright.parallel.axes.context import mask_maker, places, take_at
from meshwright.parallel.axes.ring import context_attend
from meshwright.parallel.groups.group import Group
from meshwright.parallel.groups.mesh import make_mesh
from meshwright.spec import Layout

SPLITS = {"zig-zag": "zigzag", "striped": "striped", "plain": "chunks"}
"""Name in the table -> layout.context_split."""
ATTEND = {"ring": "ring", "gather": "all-gather"}
"""Name in the table -> layout.context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes of one attention over a whole sequence."""

    sequence: int = 4096
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    repeats: int = 5


def inputs(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of the result, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return [torch.randn(1, case.sequence, count, case.head_dim, generator=generator) for count in heads]


def timed(attention: Callable[..., Tensor], leaves: list[Tensor], mask: Mask, case: Case, group: Group) -> list[Any]:
    """(wall, processor) seconds of forward and backward, one pair a repeat; the first, which warms up, is left out."""
    q, k, v = (x.clone().requires_grad_() for x in leaves[:3])
    times = []
    for _ in range(case.repeats + 1):
        group.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        attention(q, k, v, mask, scale=case.head_dim**-0.5).backward(leaves[3])
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return times[1:]


def on_rank(rank: int, size: int, store: str, case: Case, pipe: Connection) -> None:
    """One process: every route and split, in turn."""
    torch.set_num_threads(1)
    compat.keep_freed_memory()
    times = {}
    if size == 1:
        times["one device"] = timed(attend, inputs(case), Mask(), case, Group("cp"))
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        group = make_mesh(Layout(cp=size))["cp"]
        for route, split in product(ATTEND, SPLITS):
            parts = [take_at(x, places(case.sequence, size, rank, SPLITS[split]), 1) for x in inputs(case)]
            mask = mask_maker(group, SPLITS[split])(parts[0].shape[1], parts[0].shape[1])
            over = context_attend(group, ATTEND[route])
            times[f"{route} {split}"] = timed(over, parts, mask, case, group)
        dist.destroy_process_group()
    pipe.send(times)


def over_ranks(size: int, case: Case) -> list[dict[str, Any]]:
    """One row for each route and split on `size` processes."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        ranks = [
            context.Process(target=on_rank, args=(rank, size, store, case, pipe), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        for _, pipe in pipes:
            pipe.close()
        results = [pipe.recv() for pipe, _ in pipes]
        for process in ranks:
            process.join()
    return [summary(size, name, [result[name] for result in results]) for name in results[0]]


def summary(size: int, name: str, ranks: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians over the repeats."""
    cpu = [statistics.median(cpu for _, cpu in repeats) for repeats in ranks]
    wall = statistics.median(max(wall for wall, _ in at) for at in zip(*ranks, strict=True))
    return {"ranks": size, "way": name, "wall_s": wall, "cpu_s": max(cpu), "even": sum(cpu) / len(cpu) / max(cpu)}


def measure(sizes: list[int], case: Case) -> dict[str, Any]:
    """The rows, one device first, each with its processor time over that of one device divided by the ranks."""
    rows = [row for size in (1, *sizes) for row in over_ranks(size, case)]
    for row in rows:
        row["over_ideal"] = row["cpu_s"] / (rows[0]["cpu_s"] / row["ranks"])
    gains = {f"{route}-{size}": zigzag_gain(rows, route, size) for size in sizes for route in ATTEND}
    return {"cores": len(os.sched_getaffinity(0)), **asdict(case), "zigzag_gain": gains, "rows": rows}


def zigzag_gain(rows: list[dict[str, Any]], route: str, size: int) -> dict[str, float]:
    """How many times faster a route is with the zig-zag split than with plain chunks, by wall time and by the
    processor time of the busiest rank."""
    plain, zigzag = (
        next(row for row in rows if (row["ranks"], row["way"]) == (size, f"{route} {split}"))
        for split in ("plain", "zig-zag")
    )
    return {key: plain[f"{key}_s"] / zigzag[f"{key}_s"] for key in ("wall", "cpu")}


def main() -> None:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sequence", type=int, default=Case().sequence)
    parser.add_argument("--repeats", type=int, default=Case().repeats)
    options = parser.parse_args()
    if min(options.ranks) < 2:
        parser.error("--ranks takes numbers of 2 or more; one device is always measured")
    result = measure(options.ranks, Case(sequence=options.sequence, repeats=options.repeats))
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{'ranks':>5}  {'way':<16}{'wall ms':>9}{'cpu ms':>9}{'even':>7}{'x ideal':>9}   ({result['cores']} cores)")
    for row in result["rows"]:
        wall, cpu = 1e3 * row["wall_s"], 1e3 * row["cpu_s"]
        print(f"{row['ranks']:>5}  {row['way']:<16}{wall:>9.1f}{cpu:>9.1f}{row['even']:>7.2f}{row['over_ideal']:>9.2f}")
    print("even: the mean rank's work over the busiest one's; 1 = all have the same. x ideal: processor time of the "
          "busiest rank, over that of one device divided by the ranks")  # fmt: skip


if __name__ == "__main__":
    main()
