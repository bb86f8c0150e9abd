"""Measure this machine for the planner: rates of devices and links by size, and what training adds to them.

On a CPU a device is one process with its share of the cores; what processes cost each other is seen by measuring 1, 2
and 4 of them at once. On GPUs every visible one is a device, alone and all of them at once.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import exp, log
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright import __version__
from meshwright.observe.calibrate.collective_rates import exchange_grids
from meshwright.observe.calibrate.host_floor import floors, with_floors
from meshwright.observe.calibrate.rates import ON_GPU, QUICK, Effort, curves, eager_passes
from meshwright.observe.calibrate.sample_plans import jobs
from meshwright.observe.calibrate.timed_steps import Timing, measured_steps, threads_of
from meshwright.observe.ranks import on_ranks
from meshwright.planner.cost.curves import DeviceCurves, LinkCurves
from meshwright.planner.cost.links import Links
from meshwright.planner.cost.speeds import Speeds
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.kernels.rate_grid import RateGrid
from meshwright.planner.machine.clusterfile import ClusterFile, Together
from meshwright.planner.machine.overheads import fitted
from meshwright.spec.cluster import CORES, Device
from meshwright.spec.head_chunk import CHUNK_BYTES
from meshwright.training import device as train_device

LIMIT_S = 600.0
BUSY = 0.5
"""Processes that run or wait to, from which on a machine is not quiet."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank found."""

    curves: DeviceCurves
    links: Mapping[tuple[str, int], RateGrid]
    eager: Mapping[str, float]


def calibrate(
    *, device: str = "", worlds: Sequence[int] = (), quick: bool = False, say: Say = lambda text: None
) -> ClusterFile:
    """This machine as a cluster file. `worlds`: numbers of ranks that are measured (default 1, 2 and 4 on a CPU; 1 and
    all on GPUs). `quick`: seconds instead of a minute, and no training: to see that it works."""
    started, load = time.perf_counter(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY:
        say(f"other processes are running (load {load:.1f}); results will be unreliable")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    worlds = worlds or ((1, 2, 4) if device == "cpu" else sorted({1, torch.cuda.device_count()}))
    effort = QUICK if quick else Effort() if device == "cpu" else ON_GPU
    found: dict[int, Measured] = {}
    for world in worlds:
        say(
            f"rates of {world} {'process' if device == 'cpu' else 'GPU'}{'es' if device == 'cpu' and world > 1 else ''}"
        )
        found[world] = _mean(on_ranks(world, _measure, effort, device, limit_s=LIMIT_S, device=device))
    machine = _machine(device, found)
    if not quick:
        if device == "cpu":
            say("steps with nothing to compute")
            machine = with_floors(machine, floors(machine, worlds))
        plans = jobs(machine, worlds, "fp32" if device == "cpu" else "bf16")
        say(f"steps of {len(plans)} small plans")
        machine = fitted(machine, plans, measured_steps(plans, Timing(seconds=0.5), device))
    provenance = _provenance(device, worlds, quick, time.perf_counter() - started, load)
    return replace(machine, provenance=provenance)


def _measure(effort: Effort, kind: str) -> Measured:
    """On one rank, while the others do the same."""
    world = dist.get_world_size()
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    train_device.prepare(device, "fp32")
    if kind == "cpu":
        torch.set_num_threads(threads_of(world))
        if world > threads_of(1):  # ranks take turns of milliseconds
            effort = replace(effort, window_s=2 * effort.window_s)
    rates = curves(effort, device, (4.0,) if kind == "cpu" else (2.0, 4.0))
    return Measured(
        curves=rates,
        links=exchange_grids(effort, device) if world > 1 else {},
        eager=eager_passes(effort, device, rates),
    )


def _mean(ranks: Sequence[Measured]) -> Measured:
    """The geometric means over ranks."""

    def middle(grids: Sequence[RateGrid]) -> RateGrid:
        values = zip(*(grid.values for grid in grids), strict=True)
        return RateGrid(grids[0].axes, tuple(_middle(some) for some in values))

    first = ranks[0]
    return Measured(
        curves=DeviceCurves(
            products={width: middle([one.curves.products[width] for one in ranks]) for width in first.curves.products},
            passes=middle([one.curves.passes for one in ranks]),
            attention=(
                middle([one.curves.attention[0] for one in ranks]),
                middle([one.curves.attention[1] for one in ranks]),
            ),
            update=middle([one.curves.update for one in ranks]),
        ),
        links={key: middle([one.links[key] for one in ranks]) for key in first.links},
        eager={key: _middle([one.eager[key] for one in ranks]) for key in first.eager},
    )


def _middle(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def _machine(kind: str, found: Mapping[int, Measured]) -> ClusterFile:
    per_node = threads_of(1) if kind == "cpu" else max(found)
    alone = found[min(found)].curves
    best = max(max(grid.values) for grid in alone.products.values())
    title, memory = _title(kind), _memory_bytes(kind)
    device = Device(
        name=title,
        memory_bytes=memory // (per_node if kind == "cpu" else 1),
        bf16_flop_per_s=best,
        bf16_matmul_flop_per_s=best,
        memory_bytes_per_s=alone.passes.values[-1],
        link_bytes_per_s=_link_bytes_per_s(found),
        source="meshwright calibrate",
        certainty="measured; the peak is the best product measured, not a data sheet's",
    )
    together = {ranks: _together(kind, ranks, one) for ranks, one in found.items()}
    eager: dict[str, Any] = {
        key: _middle([one.eager[key] for one in found.values()]) for key in found[min(found)].eager
    }
    if kind == "cuda":
        return ClusterFile(device=device, devices_per_node=per_node, together=together)
    stack = replace(
        MESHWRIGHT, **eager, host_s=0.0, contention=0.0, hides_gradients=0.0, hides_weights=0.0, hides_beside=0.0,
        hides_sends=0.0, head_chunk_bytes=float(CHUNK_BYTES["cpu"]),
    )  # fmt: skip
    return ClusterFile(device=device, devices_per_node=per_node, together=together, stack=stack)


def _together(kind: str, ranks: int, one: Measured) -> Together:
    best = max(max(grid.values) for grid in one.curves.products.values())
    crowd = max(1.0, ranks / threads_of(1)) if kind == "cpu" else 1.0
    plain: dict[str, Any] = {
        "product_share": 1.0,
        "memory_share": 1.0,
        "attention_forward": 1.0,
        "attention_backward": 1.0,
    }
    speeds = Speeds(
        matmul_flop_per_s=best, peak_flop_per_s=best, memory_bytes_per_s=one.curves.passes.values[-1],
        ranks_per_core=crowd, launch_s=0.0, curves=one.curves, **plain,
    )  # fmt: skip
    link = _link_bytes_per_s({ranks: one}) or 1e9
    links = Links(per_node=ranks, link_bytes_per_s=link, network_bytes_per_s=link / 10)
    return Together(speeds=speeds, links=replace(links, curves=LinkCurves(seconds=one.links)) if one.links else links)


def _link_bytes_per_s(found: Mapping[int, Measured]) -> float:
    """Of the largest send between two."""
    sends = [grid for one in found.values() for (name, _), grid in one.links.items() if name == "send"]
    return max((grid.axes[0][-1] / grid.values[-1] for grid in sends), default=0.0)


def _title(kind: str) -> str:
    if kind == "cuda":
        return torch.cuda.get_device_name(0)
    return f"{processor()}, {threads_of(1)}{CORES}"


def processor() -> str:
    """Its name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()


def _memory_bytes(kind: str) -> int:
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _provenance(kind: str, worlds: Sequence[int], quick: bool, seconds: float, load: float) -> dict[str, Any]:
    threads = ", ".join(f"{threads_of(world)} of {world}" for world in worlds) if kind == "cpu" else ""
    found = {
        "machine": f"{_title(kind)}, {platform.machine()}, {_memory_bytes(kind) / 2**30:.1f} GiB",
        "date": str(date.today()),
        "versions": f"meshwright {__version__}, Python {platform.python_version()}, torch {torch.__version__}",
        "command": "meshwright calibrate" + (" --quick" if quick else ""),
        "method": "lower quartile of rounds of the mean over a window, all ranks at once, cases in turn"
        + ("" if quick else "; [stack] and shares fitted to real steps of small plans"),
        "seconds": f"{seconds:.0f}",
        "load": f"{load:.2f} before",
    }
    return found | ({"threads": f"{threads} processes"} if threads else {"platform": sys.platform})
