"""How long the planner takes: the search of a large space on one core, `plan` of one layout, growth with the space.

    python -m benchmarks.planner_speed [--json] [--picture FILE.png]

Every measurement is a process of its own, the least of three; seconds of a search are processor time of that process
(one thread), of `plan` the wall from its start to its end.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LARGE = ("llama-3.1-405b", 2048, 2048)
"""Model, nodes of eight devices, sequences of 8,192 tokens a step."""
SPACES = [("llama-3.1-8b", nodes, 512) for nodes in (1, 2, 4, 8, 16, 32, 64)]
SPACES += [("llama-3.1-70b", nodes, 1024) for nodes in (8, 16, 32, 64, 128)]
SPACES += [("llama-3.1-405b", nodes, 2048) for nodes in (64, 256, 1024, 2048)]
SEARCH = """
import json, sys, time
from meshwright.planner.step.predict import build_estimator
from meshwright.planner.search.ranking import search
from meshwright.spec import Plan, Recipe, presets
model, nodes, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
recipe = Recipe(sequence=8192, global_batch=batch, precision="bf16")
plan = Plan(model=presets.model(model), recipe=recipe, cluster=presets.cluster("h100x8", nodes))
start = time.process_time()
found = search(build_estimator(plan), plan)
seconds = time.process_time() - start
peak = next(int(row.split()[1]) * 1024 for row in open("/proc/self/status") if row.startswith("VmHWM"))
print(json.dumps({"legal": found.legal, "seconds": seconds, "bytes": peak, "fits": len(found.best)}))
"""
ONE = [
    *("plan", "llama-3.1-8b", "--cluster", "h100x8", "--json", "--layout"),
    "dp=8,dp_shard=8,zero=3,tp=1,cp=1,pp=1,micro_batch=1,recompute=none",
]
WARM = """
import time
import meshwright as mw
def seconds():
    start = time.process_time()
    mw.plan("llama-3.1-8b", cluster="h100x8", nodes=4)
    return time.process_time() - start
seconds()
print(min(seconds() for _ in range(5)))
"""
REPEATS = 3


def searched(model: str, nodes: int, batch: int) -> dict[str, Any]:
    """Legal layouts, processor seconds, peak resident bytes; the fastest of REPEATS processes."""
    command = [sys.executable, "-c", SEARCH, model, str(nodes), str(batch)]
    runs: list[dict[str, Any]] = [
        json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(REPEATS)
    ]
    return min(runs, key=lambda run: float(run["seconds"]))


def one_layout_s() -> float:
    """From the start of a process to its end, of an installed package: its modules compiled by the first run."""
    seconds = []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(3 * REPEATS):
        start = time.perf_counter()
        command = [sys.executable, "-m", "meshwright", *ONE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def warm_s() -> float:
    """Processor seconds of `mw.plan` in a process that has planned before."""
    return float(subprocess.run([sys.executable, "-c", WARM], check=True, capture_output=True).stdout)


def exponent(points: list[dict[str, Any]]) -> float:
    """Slope of log seconds over log legal layouts, by least squares: 1 = linear."""
    pairs = [(math.log(p["legal"]), math.log(p["seconds"])) for p in points]
    mean = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
    top = sum((x - mean[0]) * (y - mean[1]) for x, y in pairs)
    slope: float = top / sum((x - mean[0]) ** 2 for x, _ in pairs)
    return slope


def draw(points: list[dict[str, Any]], slope: float, file: Path) -> None:
    """Seconds over legal layouts, and what linear growth from the first point would be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    legal = sorted(p["legal"] for p in points)
    first = min(points, key=lambda p: p["legal"])
    axes.plot(legal, [first["seconds"] * n / first["legal"] for n in legal], color="0.7", label="linear growth")
    for model in dict.fromkeys(p["model"] for p in points):
        model_points = [p for p in points if p["model"] == model]
        axes.plot(
            [p["legal"] for p in model_points], [p["seconds"] for p in model_points], "o-", label=model, markersize=4
        )
    axes.set(xscale="log", yscale="log", xlabel="legal layouts", ylabel="seconds, one core")
    axes.set_title(f"Search: seconds grow with the {slope:.2f}th power of the layouts", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    points: list[dict[str, Any]] = [
        {"model": model, "nodes": nodes, **searched(model, nodes, batch)} for model, nodes, batch in SPACES
    ]
    large = next(p for p in points if (p["model"], p["nodes"]) == LARGE[:2])
    figures: dict[str, Any] = {
        "large_seconds": large["seconds"],
        "large_mb": large["bytes"] / 1e6,
        "large_legal": large["legal"],
        "one_layout_seconds": one_layout_s(),
        "warm_seconds": warm_s(),
        "exponent": exponent(points),
        "points": points,
    }
    if options.picture:
        draw(points, figures["exponent"], options.picture)
    if options.json:
        print(json.dumps(figures))
        return
    for p in points:
        space = f"{p['model']:>15} {p['nodes']:>5} nodes {p['legal']:>9,} legal"
        print(f"{space} {p['seconds']:7.2f} s {p['bytes'] / 1e6:6.0f} MB")
    print(f"one layout, from process start: {figures['one_layout_seconds']:.2f} s; exponent {figures['exponent']:.2f}")


if __name__ == "__main__":
    main()
