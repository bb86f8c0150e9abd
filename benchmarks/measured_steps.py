"""Steps of this engine on a GPU, measured, and what the planner says of them.

    python -m benchmarks.measured_steps [benchmarks/own_h200_steps.csv] [--today] [--json]

The table of 2026-11-27 is of one H200 (driver 580.159, torch 2.11.0+cu130, Triton 3.6, Python 3.12), median of windows
of two steps after five, with random tokens and documents of equal lengths. It was taken before logits were padded in
memory: rows are planned as that engine ran them, or with `--today` as this one does.

"left out" is the error of a row where the seven constants of the engine's speeds are fitted to the other rows, from
where they stand and with a spread of a tenth (PRIORS): how far off a row that nobody has seen is to be expected.
"""

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.cost.speeds import attention_of, engine_speeds
from meshwright.planner.cost.stack import MESHWRIGHT, on_gpu
from meshwright.planner.step.predict import build_estimator
from meshwright.spec import Cluster, Layout, Plan, Recipe, presets

TABLE = Path(__file__).with_name("own_h200_steps.csv")
MEASURED_STACK = replace(
    MESHWRIGHT, name="meshwright of 2026-11-27", pads_head=False, flash=2, updates_at_once=False, sums_products=False,
    selective="products",
)  # fmt: skip
"""The engine that took those steps, where it was another."""
PRIORS = {
    "product_share": 0.1, "unaligned_share": 0.3, "grouped_share": 0.3, "memory_share": 0.1, "tf32_share": 0.5,
    "attention_forward": 0.1, "attention_backward": 0.1,
}  # fmt: skip
"""Constants of Speeds that are fitted, and how far each may go: a standard deviation of its logarithm."""
NOISE = 0.025
"""Standard deviation of a step's error, as a share."""
NUDGE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A row of the table."""

    plan: Plan
    document_tokens: float
    """Of each document; 0 = rows are whole."""
    step_s: float
    peak_bytes: float
    words: str
    """What the row says of its plan."""

    def planned_s(self, *, today: bool = False, changes: dict[str, float] | None = None) -> float:
        """As the planner has it. `changes`: factors of constants of Speeds."""
        stack = MESHWRIGHT if today else MEASURED_STACK
        speeds = engine_speeds(self.plan.cluster.device, attention_of(stack, self.plan))
        speeds = replace(speeds, **{name: getattr(speeds, name) * factor for name, factor in (changes or {}).items()})
        speeds = speeds.in_tf32() if self.plan.recipe.tf32 else speeds
        estimator = build_estimator(self.plan, on_gpu(stack), speeds, document_tokens=self.document_tokens)
        return estimator.time(self.plan.layout).total_s


def read(path: Path = TABLE, cluster: str = "h200x1") -> list[MeasuredStep]:
    """The rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_row(columns, cluster) for columns in csv.DictReader(file)]


def _row(columns: dict[str, str], cluster: str) -> MeasuredStep:
    name, *changed = columns["model"].split()
    sequence, documents = int(columns["sequence"]), int(columns["documents_per_row"])
    rows, times = int(columns["micro_batch"]), int(columns["accumulation"])
    shape = presets.model(name)
    fields = {"max_positions": max(shape.max_positions, sequence), **_settings(changed)}
    if int(columns["layers"]):
        fields["layers"] = int(columns["layers"])
    recipe = {"precision": "bf16", **_settings(columns["recipe"].split())}
    plan = Plan(
        model=replace(shape, **fields),
        cluster=Cluster(device=presets.cluster(cluster).device),
        layout=Layout(**{"micro_batch": rows, "cuda_graphs": "off", **_settings(columns["layout"].split())}),
        recipe=Recipe(sequence=sequence, global_batch=rows * times, document_mask=documents > 0, **recipe),
    )
    packed = f", {documents} documents a row" if documents else ""
    words = f"{columns['model']}{'/' + columns['layers'] if int(columns['layers']) else ''}, {sequence:,} x {rows}"
    words += f"{f' x {times}' if times > 1 else ''}{packed}, {columns['layout']} {columns['recipe']}".rstrip()
    return MeasuredStep(
        plan=plan,
        document_tokens=sequence / documents if documents else 0.0,
        step_s=float(columns["step_ms"]) / 1e3,
        peak_bytes=float(columns["peak_tensor_gib"]) * 2**30,
        words=words,
    )


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """`compile=on vocab=50304` -> keys and values."""
    pairs = (word.split("=", 1) for word in words)
    plain = {"true": True, "false": False}
    return {key: plain.get(text, int(text) if text.isdecimal() else text) for key, text in pairs}


def left_out(steps: Sequence[MeasuredStep]) -> list[float]:
    """Errors of each row by constants that were fitted to all others: least squares on logarithms, one Newton step."""
    names = list(PRIORS)
    begin = np.array([_log_error(step) for step in steps])
    slopes = np.stack(
        [np.array([_log_error(step, {name: exp(NUDGE)}) for step in steps]) - begin for name in names], axis=1
    )
    slopes /= NUDGE
    errors = []
    for index, step in enumerate(steps):
        others = [row for row in range(len(steps)) if row != index]
        at = _least_squares(begin[others], slopes[others])
        errors.append(exp(_log_error(step, {name: exp(x) for name, x in zip(names, at, strict=True)})) - 1)
    return errors


def _log_error(step: MeasuredStep, changes: dict[str, float] | None = None) -> float:
    return log(step.planned_s(changes=changes) / step.step_s)


def _least_squares(errors: NDArray[np.float64], slopes: NDArray[np.float64]) -> NDArray[np.float64]:
    spread = np.array(list(PRIORS.values()))
    rows = np.vstack([slopes / NOISE, np.diag(1 / spread)])
    wanted = np.concatenate([-errors / NOISE, np.zeros(len(spread))])
    solution: NDArray[np.float64] = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return solution


def main() -> None:
    """Print the table and its mean errors."""
    parser = argparse.ArgumentParser(description="Plans of measured steps of this engine.")
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--today", action="store_true", help="plan them as the engine of today runs them")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    steps = read(options.table)
    errors = [step.planned_s(today=options.today) / step.step_s - 1 for step in steps]
    unseen = [] if options.today or len(steps) < 2 else left_out(steps)
    rows = [
        {"row": step.words, "measured_ms": step.step_s * 1e3, "planned_ms": (1 + error) * step.step_s * 1e3,
         "error": error, **({"left_out": unseen[index]} if unseen else {})}
        for index, (step, error) in enumerate(zip(steps, errors, strict=True))
    ]  # fmt: skip
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        beside = f"  left out {row['left_out']:+6.1%}" if unseen else ""
        print(
            f"{row['measured_ms']:8.1f} ms, planned {row['planned_ms']:8.1f}, {row['error']:+6.1%}{beside}"
            f"  {row['row']}"
        )
    for name, errors_of_kind in (("planned", errors), ("left out", unseen)):
        if errors_of_kind:
            print(
                f"{name}: {mean(map(abs, errors_of_kind)):.1%} in the mean, {max(map(abs, errors_of_kind)):.1%} at most"
            )


if __name__ == "__main__":
    main()
