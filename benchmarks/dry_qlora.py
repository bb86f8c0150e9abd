"""QLoRA of an 8B model on one card of 24 GB: the dry run's peak, and how far off the plan's is.

    python -m benchmarks.dry_qlora [--model llama-3.1-8b] [--cluster rtx4090x1] [--json]

The layout is the one that `meshwright plan MODEL --cluster CLUSTER --tune qlora` recommends.
"""

import argparse
import json
from typing import Any

from meshwright.observe.dryrun.simulate import dry_run
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec.units import GIB
from meshwright.verbs.plan.answer import plan


def compared(model: str, cluster: str) -> dict[str, Any]:
    """Peaks, without what the planner adds for libraries."""
    best = plan(model, cluster=cluster, tune="qlora").ranking.best[0]
    planned = best.worst.total_bytes - best.worst.kinds["reserve"]
    seen = dry_run(best.plan, device="cuda")
    return {
        "peak_bytes": seen.peak_bytes,
        "planned_bytes": planned,
        "usable_bytes": usable_bytes(best.plan),
        "parameters_bytes": seen.worst.kinds["parameters"],
        "micro_batch": best.plan.layout.micro_batch,
        "recompute": best.plan.layout.recompute,
        "error": abs(planned / seen.peak_bytes - 1),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--cluster", default="rtx4090x1")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    figures = compared(asked.model, asked.cluster)
    if asked.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:17} {f'{value / GIB:.2f} GiB' if name.endswith('_bytes') else value}")


if __name__ == "__main__":
    main()
