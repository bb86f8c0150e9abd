"""What a dry run takes: models of 70 and 405 billion parameters on 1,024 and 16,384 ranks, and worlds of several sizes.

    python -m benchmarks.dry_run_scale [--json]

Seconds are those of the clock, with as many processes as cores; beside them those of the cores. Memory is that of all
processes that run at once, at their largest. The world of a rank grows, what it computes does not: its seconds of a
core should stay.
"""

import argparse
import json
import os
import time
from typing import Any

from meshwright.observe.dryrun.simulate import DryRun, dry_run
from meshwright.planner.explain import layout_words
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.training.device import resident_peak_bytes

LARGE = {
    "70b-1024": ("llama-3.1-70b", 1024, {"dp_shard": 16, "tp": 8, "pp": 8, "zero": 1}),
    "405b-16384": ("llama-3.1-405b", 2048, {"dp_shard": 128, "tp": 8, "pp": 16, "zero": 1}),
}
WORLDS = (64, 1024, 16384)


def plan_of(model: str, batch: int, layout: dict[str, Any]) -> Plan:
    """Sequences of 8192 in bf16, one a micro-batch, with sequence parallelism."""
    recipe = Recipe(sequence=8192, global_batch=batch, precision="bf16", document_mask=False)
    laid = Layout(sp=True, micro_batch=1, recompute="selective", compile="off", **layout)
    return Plan(model=presets.model(model), recipe=recipe, layout=laid)


def cost(name: str, found: DryRun, seconds: float) -> dict[str, Any]:
    """A row."""
    at_once = min(len(found.ranks), len(os.sched_getaffinity(0)))
    largest = sorted((one.resident_bytes for one in found.costs.values()), reverse=True)[:at_once]
    return {
        "name": name, "ranks": found.plan.layout.world, "layout": layout_words(found.plan.layout),
        "seconds": seconds, "core_seconds": sum(one.seconds for one in found.costs.values()),
        "resident_bytes": resident_peak_bytes() + sum(largest), "ranks_run": len(found.ranks),
        "peak_bytes": found.peak_bytes, "peak_rank": found.worst.rank,
    }  # fmt: skip


def timed(name: str, plan: Plan, **options: Any) -> dict[str, Any]:
    """One dry run and what it took."""
    started = time.perf_counter()
    found = dry_run(plan, device="cuda", **options)
    return cost(name, found, time.perf_counter() - started)


def main() -> None:
    """All of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warm = plan_of("llama-3.1-8b", 8, {"dp_replicate": 4, "tp": 2})
    dry_run(warm, device="cuda")  # the server of processes loads torch once
    rows = [timed(name, plan_of(model, batch, layout)) for name, (model, batch, layout) in LARGE.items()]
    worlds = []
    for world in WORLDS:
        layout = {"dp_replicate": world // 16, "tp": 8, "pp": 2}
        worlds.append(timed(f"8b-{world}", plan_of("llama-3.1-8b", 2 * world, layout), ranks=[0]))
    result = {"rows": rows, "worlds": worlds, "growth": worlds[-1]["core_seconds"] / worlds[0]["core_seconds"]}
    if options.json:
        print(json.dumps(result))
        return
    for one in (*rows, *worlds):
        print(
            f"{one['name']:<12} {one['seconds']:6.1f} s, {one['core_seconds']:6.1f} s of a core, "
            f"{one['resident_bytes'] / 2**30:5.2f} GiB, {one['ranks_run']} ranks run; "
            f"peak {one['peak_bytes'] / 2**30:.1f} GiB on rank {one['peak_rank']}; {one['layout']}"
        )
    print(f"{WORLDS[-1]} ranks take {result['growth']:.2f} times the core seconds of {WORLDS[0]}")


if __name__ == "__main__":
    main()
