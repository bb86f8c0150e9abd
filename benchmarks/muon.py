"""Curves of a small model with Muon beside AdamW's: same text, seed, batches, learning rate and weight decay.

    python -m benchmarks.muon [--json] [--steps 40]

As benchmarks/optimizer_states.py, with recipe.optimizer changed. `off` is the loss over the last five steps, minus that
of AdamW in the same precision: below 0, Muon is ahead.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.optimizer_states import curve, show

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32, adamw": {},
    "fp32, muon": {"optimizer": "muon"},
    "fp32, muon, bf16 states": {"optimizer": "muon", "optimizer_states": "bf16"},
    "bf16, adamw": {"precision": "bf16"},
    "bf16, muon": {"precision": "bf16", "optimizer": "muon"},
    "bf16, muon, int8 states": {"precision": "bf16", "optimizer": "muon", "optimizer_states": "int8"},
}


def measured(steps: int) -> dict[str, Any]:
    """All curves, and how far each of Muon's ends from AdamW's: `largest_off` is the worst for Muon."""
    with tempfile.TemporaryDirectory() as folder:
        curves = {name: curve(Path(folder), name, steps, changes) for name, changes in VARIANTS.items()}
    for name, variant in curves.items():
        variant["off"] = variant["last"] - curves[f"{name.split(',')[0]}, adamw"]["last"]
    worst = max(variant["off"] for name, variant in curves.items() if "muon" in name)
    return {"steps": steps, "largest_off": worst, "curves": curves}


def main() -> None:
    """Print a table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    figures = measured(options.steps)
    if options.json:
        print(json.dumps(figures))
    else:
        show(figures)


if __name__ == "__main__":
    main()
