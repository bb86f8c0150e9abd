"""How long `rent` takes over all devices with a price and 1 to 256 nodes, and how well its closed forms hold.

    python -m benchmarks.rent [--json] [--model llama-3.1-8b] [--tokens 1T] [--repeats 3]

`processor_seconds`: of one process from its start to its end, the least of some. `largest_goodput_gap`: of goodput in
closed form from the simulated one, over clusters of 8 to 16,384 devices. `largest_interval_loss`: how much longer a run
takes with Daly's interval than with the best one, found numerically, over saves of 1e-5 to 0.5 of the time between
failures.
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from meshwright.planner.rent.checkpoint_interval import daly, expected_wall_s
from meshwright.planner.rent.failures import Conditions, saves_of
from meshwright.planner.rent.goodput import weeks
from meshwright.planner.rent.simulation import play

DAY_S = 86_400.0
CLUSTERS = ((20, 8, 1e11), (100, 64, 1e12), (30, 1024, 1e12), (10, 2048, 1e11), (54, 16_384, 5.7e12))
"""Days of steps, devices, bytes of a checkpoint."""


def timed(model: str, tokens: str) -> dict[str, Any]:
    """One run of the verb: its document, and the processor time of its process."""
    command = [sys.executable, "-m", "meshwright", "rent", model, "--tokens", tokens, "--json"]
    before = os.times()
    told = subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "document": json.loads(told)}


def goodput_gap() -> float:
    """Largest difference of goodput in closed form from the simulated one."""
    gaps = []
    for days, devices, size in CLUSTERS:
        saves = saves_of(size / devices, size, devices // 8, 50e9, 2e9)
        one = weeks(days * DAY_S, 5.0, devices, devices // 8, saves, Conditions())
        gaps.append(abs(one.goodput - play(one, seed=1, runs=100).goodput))
    return max(gaps)


def interval_loss() -> float:
    """Largest share by which Daly's interval is worse than the best of a fine grid."""
    found = []
    for share in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5):
        grid = (1.002**step * 1e-4 for step in range(6000))
        least = min(expected_wall_s(1.0, interval, share, 0.0, 1.0) for interval in grid if interval < 10)
        found.append(expected_wall_s(1.0, daly(share, 1.0), share, 0.0, 1.0) / least - 1)
    return max(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--tokens", default="1T")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    runs = [timed(options.model, options.tokens) for _ in range(options.repeats)]
    best = min(runs, key=lambda run: run["seconds"])
    found = {
        "processor_seconds": best["seconds"],
        "clusters": best["document"]["clusters"]["tried"],
        "front": len(best["document"]["front"]),
        "largest_goodput_gap": goodput_gap(),
        "largest_interval_loss": interval_loss(),
    }
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<24}{value:>12.4g}")


if __name__ == "__main__":
    main()
