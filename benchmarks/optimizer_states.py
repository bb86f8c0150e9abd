"""Curves of a small model with each way to store optimizer states, beside fp32 states: same text, seed and batches.

    python -m benchmarks.optimizer_states [--json] [--steps 40]

Each run is `meshwright train` on the Python standard library's source, on the CPU, with one recipe key or two changed.
`off` is the loss over the last five steps, minus that of fp32 states in the same precision.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from meshwright.spec import Data, Plan, Recipe, presets
from meshwright.store.run_folder import MetricsLog, RunFolder
from meshwright.training import loop
from meshwright.training.fits import checkpoint_bytes

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, bf16 states": {"optimizer_states": "bf16"},
    "fp32, int8 states": {"optimizer_states": "int8"},
    "bf16": {"precision": "bf16"},
    "bf16, bf16 states": {"precision": "bf16", "optimizer_states": "bf16"},
    "bf16, int8 states": {"precision": "bf16", "optimizer_states": "int8"},
    "bf16, no masters": {"precision": "bf16", "master_weights": "none"},
    "bf16, bf16 states, no masters": {"precision": "bf16", "optimizer_states": "bf16", "master_weights": "none"},
    "bf16, int8 states, no masters": {"precision": "bf16", "optimizer_states": "int8", "master_weights": "none"},
}
SHAPE = replace(
    presets.model("llama-tiny"), layers=4, hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=384, vocab=2048
)
LAST = 5
"""Steps whose mean loss is compared."""


def curve(folder: Path, name: str, steps: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Losses by step, and bytes of a checkpoint's tensors for each parameter."""
    recipe = Recipe(
        steps=steps, sequence=128, global_batch=16, learning_rate=4e-3, eval_every=0, checkpoint_every=0, **changes
    )
    data = Data(path="stdlib", tokenizer="bpe:2048", limit_bytes=2_000_000)
    plan = Plan(model=SHAPE, data=data, recipe=recipe, run=str(folder / name.replace(", ", "-").replace(" ", "-")))
    loop.run(plan)
    losses = [record["loss"] for record in MetricsLog.read(RunFolder.open(Path(plan.run)).metrics) if "loss" in record]
    assert len(losses) >= steps, f"the run of {name!r} was ended after {len(losses)} of {steps} steps"
    elements = checkpoint_bytes(SHAPE, Recipe()) / 12
    return {"losses": losses[:steps], "last": mean(losses[:steps][-LAST:]),
            "bytes": round(checkpoint_bytes(SHAPE, recipe) / elements, 2)}  # fmt: skip


def measured(steps: int) -> dict[str, Any]:
    """All curves, and how far each ends from that of fp32 states."""
    with tempfile.TemporaryDirectory() as folder:
        curves = {name: curve(Path(folder), name, steps, changes) for name, changes in VARIANTS.items()}
    for name, variant in curves.items():
        variant["off"] = variant["last"] - curves[name.split(",")[0]]["last"]
    return {"steps": steps, "largest_off": max(abs(variant["off"]) for variant in curves.values()), "curves": curves}


def main() -> None:
    """Print a table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    figures = measured(options.steps)
    if options.json:
        print(json.dumps(figures))
        return
    show(figures)


def show(figures: dict[str, Any]) -> None:
    """A line for each curve."""
    for name, variant in figures["curves"].items():
        losses = f"first {variant['losses'][0]:.4f}  last {variant['last']:.4f}  off {variant['off']:+.4f}"
        print(f"{name:32} {variant['bytes']:6.2f} bytes  {losses}")


if __name__ == "__main__":
    main()
