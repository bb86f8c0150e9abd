"""Peak memory of measured steps of this engine on a GPU, beside a dry run and the planner.

    python -m benchmarks.measured_peaks [benchmarks/own_h200_steps.csv] [--today] [--only 0,17] [--plan]

The rows are those of benchmarks.measured_steps: peaks of torch.cuda.max_memory_allocated. They were taken before blocks
with documents were compiled whole: such rows are planned as that engine ran them, in halves that keep what uncompiled
blocks keep, or with `--today` as this one does. Selective recomputation kept results of products with weights then, and
made all else again: a dry run, which runs the engine of today, has no figure for it. No GPU is needed. The reserve of a
plan (workspaces of matrix products) is no part of either figure, while 64 MiB of it are in the measured ones.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from benchmarks.measured_steps import TABLE, MeasuredStep, read
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.step.predict import predict
from meshwright.spec import Plan
from meshwright.spec.units import gib


def as_run(step: MeasuredStep, *, today: bool) -> Plan:
    """The plan of a row, as the engine that was measured ran it, or as this one does."""
    cut = step.plan.recipe.document_mask and not today
    return replace(step.plan, layout=replace(step.plan.layout, compile="off")) if cut else step.plan


def runs_today(step: MeasuredStep) -> bool:
    """Whether the engine of today recomputes as the one that took this step."""
    return step.plan.layout.recompute != "selective"


def planned_bytes(plan: Plan, *, today: bool) -> float:
    """The planner's peak without its reserve, under that engine's policies of recomputation or under this one's."""
    prediction = predict(plan, MESHWRIGHT if today else replace(MESHWRIGHT, selective="products"))
    return prediction.peak_bytes - prediction.worst.kinds["reserve"]


def summary(name: str, errors: Sequence[float]) -> str:
    """`planned: 0.4 % in the mean, 1.1 % at most`."""
    sizes = [abs(error) for error in errors]
    return f"{name}: {mean(sizes):.1%} in the mean, {max(sizes):.1%} at most"


def main() -> None:
    """Print each row and the mean errors."""
    parser = argparse.ArgumentParser(description="Peak memory of measured steps of this engine.")
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--today", action="store_true", help="plan them as the engine of today runs them")
    parser.add_argument("--only", default="", help="numbers of rows, from 0")
    parser.add_argument("--plan", action="store_true", help="the planner alone, in a second")
    options = parser.parse_args()
    wanted = {int(word) for word in options.only.split(",") if word}
    planned_errors, dry_errors = [], []
    for number, step in enumerate(read(options.table)):
        if wanted and number not in wanted:
            continue
        plan = as_run(step, today=options.today)
        planned = planned_bytes(plan, today=options.today)
        planned_errors.append(planned / step.peak_bytes - 1)
        beside = ""
        if not options.plan and (options.today or runs_today(step)):
            dry = dry_run(plan, device="cuda").peak_bytes
            dry_errors.append(dry / step.peak_bytes - 1)
            beside = f"  dry run {gib(dry)} {dry_errors[-1]:+6.1%}"
        error = f"{planned_errors[-1]:+6.1%}"
        print(f"{gib(step.peak_bytes):>10}{beside}  planned {gib(planned)} {error}  {step.words}", flush=True)
    print(summary("planned", planned_errors))
    if dry_errors:
        print(summary("dry run", dry_errors))


if __name__ == "__main__":
    main()
