"""Calibration of this machine for the planner: rates of devices and links by size, and the overheads of training.

On a CPU a device is one process with its share of the cores. Measuring 1, 2 and 4 processes at once shows what they
cost each other. On GPUs every visible one is a device, measured alone and all at once.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import exp, log
from typing import Any

import torch
import torch.distributed as dist

from meshwright import __version__
from meshwright.observe.ranks import on_ranks
from meshwright.observe.rates import (
    ON_GPU,
    QUICK,
    Effort,
    exchange_grids,
    measure_curves,
    measure_eager_passes,
    processor,
)
from meshwright.observe.timed_steps import Timing, measure_floors, measure_steps, threads_of, with_floors
from meshwright.planner.cost.exchanges import Links
from meshwright.planner.cost.speeds import DeviceCurves, LinkCurves, Speeds
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.kernels.fitted_kernel import RateGrid
from meshwright.planner.machine.clusterfile import ClusterFile, MeasuredRates
from meshwright.planner.machine.overheads import fit_overheads
from meshwright.spec.layout.cluster import CORES, Device
from meshwright.spec.layout.layout import Layout
from meshwright.spec.memory.held import CHUNK_BYTES
from meshwright.spec.model.shape import ModelShape, MoEShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.recipe.recipe import Recipe
from meshwright.training import device as train_device

LIMIT_S = 600.0
BUSY = 0.5
"""Load of other processes above which measurements are unreliable."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """Measurements of one rank."""

    curves: DeviceCurves
    links: Mapping[tuple[str, int], RateGrid]
    eager: Mapping[str, float]


def calibrate(
    *, device: str = "", worlds: Sequence[int] = (), quick: bool = False, say: Say = lambda text: None
) -> ClusterFile:
    """Measure this machine and return its cluster file.

    Args:
        worlds: Numbers of ranks to measure. Empty = 1, 2 and 4 on a CPU; 1 and all on GPUs.
        quick: Take seconds instead of a minute and train nothing, to see that it works.
    """
    started, load = time.perf_counter(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    # Only a warning: on a shared machine there may be no better moment.
    if load > BUSY:
        say(f"other processes are running (load {load:.1f}); results will be unreliable")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    worlds = worlds or ((1, 2, 4) if device == "cpu" else sorted({1, torch.cuda.device_count()}))
    effort = QUICK if quick else Effort() if device == "cpu" else ON_GPU
    measured: dict[int, RankMeasurement] = {}
    for world in worlds:
        unit = "GPU" if device == "cuda" else "process" if world == 1 else "processes"
        say(f"rates of {world} {unit}")
        # Fresh processes for each number of ranks: threads and allocations of another would disturb the rates.
        measured[world] = _average_ranks(on_ranks(world, _measure_rank, effort, device, limit_s=LIMIT_S, device=device))
    # Each fit uses what the one before it found: rates, then host times, then the overheads of whole steps.
    machine = _describe_machine(device, measured)
    if not quick:
        if device == "cpu":
            say("steps with nothing to compute")
            machine = with_floors(machine, measure_floors(machine, worlds))
        plans = sample_plans(machine, worlds, "fp32" if device == "cpu" else "bf16")
        say(f"steps of {len(plans)} small plans")
        machine = fit_overheads(machine, plans, measure_steps(plans, Timing(seconds=0.5), device))
    provenance = _provenance(device, worlds, quick, time.perf_counter() - started, load)
    return replace(machine, provenance=provenance)


def _measure_rank(effort: Effort, kind: str) -> RankMeasurement:
    world = dist.get_world_size()
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    train_device.prepare(device, "fp32")
    if kind == "cpu":
        torch.set_num_threads(threads_of(world))
        if world > threads_of(1):  # ranks take turns of milliseconds
            effort = replace(effort, window_s=2 * effort.window_s)
    rates = measure_curves(effort, device, (4.0,) if kind == "cpu" else (2.0, 4.0))
    return RankMeasurement(
        curves=rates,
        links=exchange_grids(effort, device) if world > 1 else {},
        eager=measure_eager_passes(effort, device, rates),
    )


def _average_ranks(ranks: Sequence[RankMeasurement]) -> RankMeasurement:
    def middle_grid(grids: Sequence[RateGrid]) -> RateGrid:
        values = zip(*(grid.values for grid in grids), strict=True)
        return RateGrid(grids[0].axes, tuple(_geometric_mean(at_point) for at_point in values))

    first = ranks[0]
    return RankMeasurement(
        curves=DeviceCurves(
            products={
                width: middle_grid([rank.curves.products[width] for rank in ranks]) for width in first.curves.products
            },
            passes=middle_grid([rank.curves.passes for rank in ranks]),
            attention=(
                middle_grid([rank.curves.attention[0] for rank in ranks]),
                middle_grid([rank.curves.attention[1] for rank in ranks]),
            ),
            update=middle_grid([rank.curves.update for rank in ranks]),
        ),
        links={key: middle_grid([rank.links[key] for rank in ranks]) for key in first.links},
        eager={key: _geometric_mean([rank.eager[key] for rank in ranks]) for key in first.eager},
    )


def _geometric_mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def _describe_machine(kind: str, measured: Mapping[int, RankMeasurement]) -> ClusterFile:
    per_node = threads_of(1) if kind == "cpu" else max(measured)
    alone = measured[min(measured)].curves
    best = max(max(grid.values) for grid in alone.products.values())
    title, memory = _title(kind), _memory_bytes(kind)
    device = Device(
        name=title,
        # On a CPU the ranks of a node share its memory; a GPU has its own.
        memory_bytes=memory // (per_node if kind == "cpu" else 1),
        bf16_flop_per_s=best,
        bf16_matmul_flop_per_s=best,
        memory_bytes_per_s=alone.passes.values[-1],
        link_bytes_per_s=_link_bytes_per_s(measured),
        source="meshwright calibrate",
        certainty="measured; the peak is the best product measured, not a data sheet's",
    )
    together = {ranks: _measured_together(kind, ranks, measurement) for ranks, measurement in measured.items()}
    eager: dict[str, Any] = {
        key: _geometric_mean([measurement.eager[key] for measurement in measured.values()])
        for key in measured[min(measured)].eager
    }
    if kind == "cuda":
        return ClusterFile(device=device, devices_per_node=per_node, rates=together)
    stack = replace(
        MESHWRIGHT, **eager, host_s=0.0, contention=0.0, hides_gradients=0.0, hides_weights=0.0, hides_beside=0.0,
        hides_sends=0.0, head_chunk_bytes=float(CHUNK_BYTES["cpu"]),
    )  # fmt: skip
    return ClusterFile(device=device, devices_per_node=per_node, rates=together, stack=stack)


def _measured_together(kind: str, ranks: int, measurement: RankMeasurement) -> MeasuredRates:
    best = max(max(grid.values) for grid in measurement.curves.products.values())
    # More ranks than cores take turns, so each gets a share of a core.
    crowd = max(1.0, ranks / threads_of(1)) if kind == "cpu" else 1.0
    plain: dict[str, Any] = {
        "product_share": 1.0,
        "memory_share": 1.0,
        "attention_forward": 1.0,
        "attention_backward": 1.0,
    }
    speeds = Speeds(
        matmul_flop_per_s=best, peak_flop_per_s=best, memory_bytes_per_s=measurement.curves.passes.values[-1],
        ranks_per_core=crowd, launch_s=0.0, curves=measurement.curves, **plain,
    )  # fmt: skip
    # One rank has no link to measure, and the fields may not be zero; no plan of one rank reads them.
    link = _link_bytes_per_s({ranks: measurement}) or 1e9
    links = Links(per_node=ranks, link_bytes_per_s=link, network_bytes_per_s=link / 10)
    return MeasuredRates(
        speeds=speeds,
        links=replace(links, curves=LinkCurves(seconds=measurement.links)) if measurement.links else links,
    )


def _link_bytes_per_s(measured: Mapping[int, RankMeasurement]) -> float:
    """Return the rate of the largest send between two ranks."""
    sends = [
        grid for measurement in measured.values() for (name, _), grid in measurement.links.items() if name == "send"
    ]
    return max((grid.axes[0][-1] / grid.values[-1] for grid in sends), default=0.0)


def _title(kind: str) -> str:
    if kind == "cuda":
        return torch.cuda.get_device_name(0)
    return f"{processor()}, {threads_of(1)}{CORES}"


def _memory_bytes(kind: str) -> int:
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _provenance(kind: str, worlds: Sequence[int], quick: bool, seconds: float, load: float) -> dict[str, Any]:
    threads = ", ".join(f"{threads_of(world)} of {world}" for world in worlds) if kind == "cpu" else ""
    provenance = {
        "machine": f"{_title(kind)}, {platform.machine()}, {_memory_bytes(kind) / 2**30:.1f} GiB",
        "date": str(date.today()),
        "versions": f"meshwright {__version__}, Python {platform.python_version()}, torch {torch.__version__}",
        "command": "meshwright calibrate" + (" --quick" if quick else ""),
        "method": "lower quartile of rounds of the mean over a window, all ranks at once, cases in turn"
        + ("" if quick else "; [stack] and shares fitted to real steps of small plans"),
        "seconds": f"{seconds:.0f}",
        "load": f"{load:.2f} before",
    }
    return provenance | ({"threads": f"{threads} processes"} if threads else {"platform": sys.platform})


LLAMA = ModelShape(
    name="calibration-llama", vocab=5000, layers=4, hidden=224, heads=4, kv_heads=4, ffn=608, max_positions=2048
)
WIDE = replace(
    LLAMA, name="calibration-wide", layers=2, hidden=448, heads=7, kv_heads=7, head_dim=64, ffn=1280, vocab=3000
)
NARROW = replace(
    LLAMA, name="calibration-narrow", layers=8, hidden=144, heads=4, kv_heads=2, head_dim=36, ffn=400, vocab=9000
)
GPT = ModelShape(
    name="calibration-gpt", family="gpt2", vocab=7000, layers=4, hidden=240, heads=6, ffn=960, max_positions=1024,
    tied=True, norm="layernorm", mlp="gelu_tanh", positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
MOE = replace(
    LLAMA, name="calibration-moe", family="mixtral", layers=3, ffn=448, moe=MoEShape(experts=6, top_k=2, ffn=224)
)

PLANS: tuple[tuple[ModelShape, int, int, dict[str, Any]], ...] = (
    (LLAMA, 192, 4, {}),
    (LLAMA, 640, 4, {"micro_batch": 1}),
    (WIDE, 320, 3, {}),
    (NARROW, 192, 6, {"micro_batch": 2, "recompute": "full"}),
    (GPT, 320, 4, {"micro_batch": 2}),
    (MOE, 192, 4, {"recompute": "selective"}),
    (LLAMA, 192, 8, {"dp_replicate": 2, "micro_batch": 2}),
    (NARROW, 320, 6, {"dp_shard": 2, "zero": 3}),
    (GPT, 192, 6, {"dp_shard": 2, "zero": 1}),
    (NARROW, 192, 4, {"tp": 2, "sp": True}),
    (LLAMA, 320, 4, {"tp": 2}),
    (NARROW, 640, 2, {"cp": 2}),
    (LLAMA, 192, 6, {"pp": 2, "micro_batch": 1}),
    (MOE, 192, 4, {"dp_shard": 2, "ep": 2, "zero": 2}),
    (LLAMA, 192, 8, {"dp_shard": 2, "tp": 2, "zero": 1}),
    (NARROW, 192, 8, {"pp": 4, "micro_batch": 1}),
    (WIDE, 192, 8, {"dp_shard": 4, "zero": 3}),
    (GPT, 320, 4, {"pp": 2, "dp_replicate": 2, "micro_batch": 1}),
    (LLAMA, 320, 4, {"cp": 2, "dp_shard": 2, "zero": 2}),
)
"""(shape, sequence, sequences per step, layout) of small, diverse plans whose real steps a calibration times."""


def sample_plans(machine: ClusterFile, worlds: Sequence[int], precision: str) -> list[Plan]:
    """Return the plans whose number of ranks was measured."""
    plans = []
    for shape, sequence, batch, layout in PLANS:
        plan = Plan(
            model=shape,
            recipe=Recipe(sequence=sequence, global_batch=batch, precision=precision),  # type: ignore[arg-type]  # one of the words of Recipe
            layout=Layout(compile="off", cuda_graphs="off", **layout),
        )
        # A plan on an unmeasured number of ranks would fit overheads to interpolated rates.
        if plan.layout.world in worlds:
            plan = replace(plan, cluster=machine.cluster(plan.layout.world))
            plan.check()
            plans.append(plan)
    return plans
