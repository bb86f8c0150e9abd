"""Loss curves on real text under many layouts beside one device, and of runs that change their layout on the way.

    python -m benchmarks.layout_curves [--json] [--text FILE] [--steps 40] [--picture docs/layout_curves.png]

Every run is the one `meshwright train` makes, on real Gloo processes of one thread each: prepared text, shared batches,
evaluation, checkpoints. The text is the Python standard library's source unless a file is given. A run that changes its
layout is ended by SIGTERM after a quarter of its steps (dense; a third with experts) and goes on from its checkpoint
under the next layout. Differences are relative to the loss of one device at the same step; `largest_weight_difference`
is that of all weights at the end, Euclidean.
"""

import argparse
import json
import math
import os
import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.layout_picture import draw
from meshwright.observe.ranks import on_ranks
from meshwright.spec import Data, Layout, ModelShape, MoEShape, Plan, Recipe
from meshwright.store import checkpoint
from meshwright.store.run_folder import MetricsLog
from meshwright.training import loop
from meshwright.training.step.watch import StepMetrics

DENSE = ModelShape(name="dense", vocab=2048, layers=4, hidden=96, heads=4, kv_heads=2, ffn=256, max_positions=128)
EXPERTS = replace(DENSE, name="experts", family="mixtral", moe=MoEShape(experts=4, top_k=2, ffn=128))
SHAPES = {"dense": DENSE, "experts": EXPERTS}
RECIPE = Recipe(sequence=128, global_batch=8, learning_rate=3e-3, eval_sequences=16, checkpoint_every=0)

LAYOUTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "one device, 8 micro-batches": ("dense", {"micro_batch": 1}),
    "4 replicas": ("dense", {"dp_replicate": 4}),
    "ZeRO-1 x 2": ("dense", {"dp_shard": 2, "zero": 1}),
    "ZeRO-2 x 2": ("dense", {"dp_shard": 2, "zero": 2, "micro_batch": 2}),
    "ZeRO-3 x 2": ("dense", {"dp_shard": 2, "zero": 3}),
    "TP 2": ("dense", {"tp": 2}),
    "TP 2 + SP": ("dense", {"tp": 2, "sp": True}),
    "CP 2, ring": ("dense", {"cp": 2}),
    "CP 2, all-gather": ("dense", {"cp": 2, "context": "all-gather"}),
    "PP 2, 1F1B": ("dense", {"pp": 2, "micro_batch": 2}),
    "PP 2, ZB-V": ("dense", {"pp": 2, "vp": 2, "schedule": "zb-v", "micro_batch": 1}),
    "2 replicas x ZeRO-3 x 2": ("dense", {"dp_replicate": 2, "dp_shard": 2, "zero": 3}),
    "DP 2 x PP 2 x TP 2": ("dense", {"dp_replicate": 2, "pp": 2, "tp": 2, "micro_batch": 2}),
    "ZeRO-3 x 2, CP 2, TP 2 + SP": ("dense", {"dp_shard": 2, "zero": 3, "cp": 2, "tp": 2, "sp": True}),
    "experts: EP 2": ("experts", {"dp_shard": 2, "ep": 2, "zero": 1}),
    "experts: PP 2 x CP 2 x TP 2, EP 4": (
        "experts",
        {"pp": 2, "cp": 2, "tp": 2, "sp": True, "ep": 4, "zero": 1, "micro_batch": 2},
    ),
}
JOURNEYS: Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]] = {
    "dense": (
        ("4 replicas", {"dp_replicate": 4}),
        ("TP 2 x PP 2", {"tp": 2, "pp": 2, "micro_batch": 2}),
        ("one process", {}),
        ("ZeRO-3 x 2, CP 2", {"dp_shard": 2, "zero": 3, "cp": 2}),
    ),
    "experts": (
        ("EP 2", {"dp_shard": 2, "ep": 2}),
        ("TP 2", {"tp": 2}),
        ("one process", {}),
    ),
}


class Ending:
    """Ends the run by SIGTERM after one of its steps, as a cluster does that takes its machines back."""

    def __init__(self, step: int) -> None:
        self.step = step

    def stepped(self, metrics: StepMetrics) -> None:
        """Called on rank 0; the others hear of it before the next step."""
        if metrics.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def train(plan: Plan, until: int) -> str:
    """On one rank: up to that step, going on from where the run folder is; how it ended."""
    watchers = [Ending(until)] if until < plan.recipe.steps else []
    return loop.run(plan, watchers=watchers, resume="auto").stopped


def trained(plan: Plan, layout: Mapping[str, Any], until: int) -> None:
    """On as many processes as the layout has ranks."""
    laid_out = replace(plan, layout=Layout(compile="off", **layout))
    ended = on_ranks(laid_out.layout.world, train, laid_out, until, limit_s=1200)
    wanted = "done" if until == plan.recipe.steps else "terminated"
    assert ended == [wanted] * laid_out.layout.world, ended


def losses(run: Path) -> list[float]:
    """One a step."""
    return [row["loss"] for row in MetricsLog.read(run / "metrics.jsonl") if row.get("kind") != "eval"]


def difference(curve: Sequence[float], right: Sequence[float]) -> list[float]:
    """Relative, step by step."""
    return [abs(a - b) / abs(b) for a, b in zip(curve, right, strict=True)]


def weights(run: Path) -> Iterable[tuple[str, torch.Tensor]]:
    """Of the last checkpoint."""
    saved = checkpoint.find_latest(run / "checkpoints")
    assert saved is not None
    return checkpoint.stream(saved, sorted(name for name in checkpoint.names(saved) if name.startswith("model.")))


def weight_difference(run: Path, right: Path) -> float:
    """Of all weights together, Euclidean, over their own size."""
    apart = size = 0.0
    for (_, ours), (_, theirs) in zip(weights(run), weights(right), strict=True):
        apart += float((ours.double() - theirs.double()).square().sum())
        size += float(theirs.double().square().sum())
    return math.sqrt(apart / size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is trained, whatever the layout."""

    data: Data
    recipe: Recipe
    folder: Path
    """For the run folders."""

    def plan(self, kind: str, name: str) -> Plan:
        """One run of a shape."""
        return Plan(model=SHAPES[kind], data=self.data, run=str(self.run(name)), recipe=self.recipe)

    def run(self, name: str) -> Path:
        """Its folder."""
        return self.folder / name.replace(" ", "-").replace(":", "").replace(",", "")


def one_device(setting: Setting, kinds: Iterable[str]) -> dict[str, list[float]]:
    """The curve of each shape, uninterrupted."""
    for kind in kinds:
        trained(setting.plan(kind, f"one {kind}"), {}, setting.recipe.steps)
    return {kind: losses(setting.run(f"one {kind}")) for kind in kinds}


def laid_out(setting: Setting, right: Mapping[str, list[float]], names: Iterable[str]) -> dict[str, Any]:
    """Each layout beside one device."""
    reports = {}
    for name in names:
        kind, layout = LAYOUTS[name]
        trained(setting.plan(kind, name), layout, setting.recipe.steps)
        reports[name] = report(setting, right, kind, name) | {"ranks": Layout(**layout).world}
    return reports


def journey(setting: Setting, right: Mapping[str, list[float]], kind: str) -> dict[str, Any]:
    """One run that goes on under other layouts."""
    legs, name = JOURNEYS[kind], f"resumed {kind}"
    ends = [setting.recipe.steps * (index + 1) // len(legs) for index in range(len(legs))]
    for (_, layout), until in zip(legs, ends, strict=True):
        trained(setting.plan(kind, name), layout, until)
    outcome = report(setting, right, kind, name)
    return outcome | {"legs": [{"layout": leg[0], "until": until} for leg, until in zip(legs, ends, strict=True)]}


def report(setting: Setting, right: Mapping[str, list[float]], kind: str, name: str) -> dict[str, Any]:
    """A run beside one device."""
    curve = losses(setting.run(name))
    apart = difference(curve, right[kind])
    return {
        "shape": kind,
        "losses": curve,
        "differences": apart,
        "largest_relative_difference": max(apart),
        "largest_weight_difference": weight_difference(setting.run(name), setting.run(f"one {kind}")),
    }


def measure(
    setting: Setting, names: Sequence[str] = tuple(LAYOUTS), kinds: Sequence[str] = tuple(SHAPES)
) -> dict[str, Any]:
    """All curves; the figures of the claims are the largest of all layouts and of all runs that changed theirs."""
    right = one_device(setting, kinds)
    layouts = laid_out(setting, right, names)
    resumed = {kind: journey(setting, right, kind) for kind in kinds}

    def largest(reports: Mapping[str, Any], what: str) -> float:
        return max(float(row[f"largest_{what}_difference"]) for row in reports.values())

    return {
        "text": setting.data.path,
        "steps": setting.recipe.steps,
        "one_device": right,
        "layouts": layouts,
        "resumed": resumed,
        "layouts_tried": len(layouts),
        "largest_relative_difference": largest(layouts, "relative"),
        "largest_weight_difference": largest(layouts, "weight"),
        "resumed_largest_relative_difference": largest(resumed, "relative"),
        "resumed_largest_weight_difference": largest(resumed, "weight"),
    }


def main() -> None:
    """Print the table, or one JSON document; draw the picture where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--text", default="stdlib", help="a file, a folder or a glob")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    data = Data(path=options.text, limit_bytes=2_000_000)
    recipe = replace(RECIPE, steps=options.steps, warmup_steps=options.steps // 10)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Setting(data=data, recipe=recipe, folder=Path(folder)))
    if options.picture:
        draw(result, options.picture)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{options.steps} steps on {options.text}: differences from one device, of any loss and of the last weights")
    rows = {**result["layouts"], **{f"resumed, {kind}": row for kind, row in result["resumed"].items()}}
    for name, row in rows.items():
        print(f"  {name:<36}{row['largest_relative_difference']:>9.1e}{row['largest_weight_difference']:>9.1e}")


if __name__ == "__main__":
    main()
