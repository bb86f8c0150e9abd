"""Fits the kernel times of planner/kernels to the published tables and scores them on rows the fit did not see.

    python -m benchmarks.kernel_times [FOLDER] [--write] [--page] [--json] [--only OPERATION]

Held out: of each device a quarter of the shapes is left out whole: products by (n, k), attention by (heads, kv_heads),
experts by model, tp and ep (kernel_fit.fold); collectives by (collective, ranks), each quarter in turn. Left out: a
device is served by the constants and curves of its stand-in, and none of its own rows is seen. --write fits to all rows
and writes the package's data/DEVICE.json; --page puts the table into docs/accuracy.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import kernel_fit as fit
from benchmarks.kernel_tables import DEVICES, GENERATION, KINDS, Array, Kind, chip, rows_of, software_of
from evaluation.leaderboard import HOW, PAGE, folder
from evaluation.leaderboard import written as between
from meshwright.planner.kernels.fitted_kernel import adapted
from meshwright.spec import presets

DATA = Path(__file__).resolve().parent.parent / "src/meshwright/planner/kernels/data"
SOURCE = "ai-dynamo/aiconfigurator 095f58a51 (Apache-2.0): fitted to its measured tables; no row of them is here"
STAND_INS = {"A100-SXM-80": "H100-SXM-80", "H100-SXM-80": "H200-SXM", "H200-SXM": "H100-SXM-80", "B200": "GB200",
             "GB200": "B200"}  # fmt: skip
OTHERS = 0.05
"""Weight of another generation's rows where a curve is drawn toward those of other devices."""


@dataclass(frozen=True)
class Fitted:
    """Constants and logs of a curve's factors."""

    figures: Mapping[str, float]
    logs: Array


def fitted(
    kind: Kind, tables: Mapping[str, Array], figures: Mapping[str, Mapping[str, float]] | None = None, only: str = ""
) -> dict[str, Fitted]:
    """All devices of a table (or `only` one), each curve drawn toward what the others have in common."""
    figures = figures or constants(kind, tables)
    residuals = residuals_of(kind, tables, figures)
    by_kind = {}
    for gpu, rows in tables.items():
        if only in ("", gpu):
            others = [other for other in tables if other != gpu]
            toward = common(kind, tables, residuals, others, gpu) if others else None
            logs = fit.curve(kind.places(rows), residuals[gpu], kind.axes, kind.smooth, None, toward, kind.coupling)
            by_kind[gpu] = Fitted(figures[gpu], logs)
    return by_kind


def constants(kind: Kind, tables: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """By device. Where an operation shares constants: the median of separate fits, then in turns the curve that all
    devices have in common and each one's own constants under it."""
    by_gpu = {gpu: _constants(kind, gpu, rows, kind.start) for gpu, rows in tables.items()}
    if not kind.own_constants:
        return by_gpu
    shared = {name: float(np.median([values[name] for values in by_gpu.values()])) for name in kind.start}
    by_gpu = {gpu: shared | {name: values[name] for name in kind.own_constants} for gpu, values in by_gpu.items()}
    for _ in range(4):
        logs = common(kind, tables, residuals_of(kind, tables, by_gpu), list(tables))
        by_gpu = {
            gpu: _constants(kind, gpu, rows, by_gpu[gpu], logs, kind.own_constants) for gpu, rows in tables.items()
        }
    return by_gpu


def _constants(
    kind: Kind, gpu: str, rows: Array, start: Mapping[str, float], logs: Array | None = None, free: Sequence[str] = ()
) -> dict[str, float]:
    places = np.ones(len(rows)) if logs is None else np.exp(fit.read(kind.places(rows), kind.axes, logs))
    known = np.column_stack([rows[:, :-1], rows[:, -1] / places])
    return fit.constants(lambda values, chosen: kind.formula(values, chip(gpu), chosen), start, known, free=free)


def residuals_of(
    kind: Kind, tables: Mapping[str, Array], figures: Mapping[str, Mapping[str, float]]
) -> dict[str, Array]:
    """Logs of what the formula leaves."""
    return {gpu: np.log(rows[:, -1] / kind.formula(figures[gpu], chip(gpu), rows)) for gpu, rows in tables.items()}


def common(
    kind: Kind, tables: Mapping[str, Array], residuals: Mapping[str, Array], others: Sequence[str], gpu: str = ""
) -> Array:
    """The curve of other devices together; those of the generation of `gpu` weigh most."""
    places = np.concatenate([kind.places(tables[other]) for other in others])
    weights = [OTHERS if gpu and GENERATION[other] != GENERATION[gpu] else 1.0 for other in others]
    counts = np.concatenate(
        [np.full(len(tables[gpu_name]), weight) for gpu_name, weight in zip(others, weights, strict=True)]
    )
    every = np.concatenate([residuals[other] for other in others])
    return fit.curve(places, every, kind.axes, kind.smooth, counts, None, kind.coupling)


def predicted(kind: Kind, constants_by_gpu: Fitted, gpu: str, rows: Array, source: str = "") -> Array:
    """Microseconds on `gpu` by a fit of `source` (empty: its own)."""
    figures = (
        adapted(constants_by_gpu.figures, chip(source).clock_ghz / chip(gpu).clock_ghz)
        if source
        else constants_by_gpu.figures
    )
    factors = np.exp(fit.read(kind.places(rows), kind.axes, constants_by_gpu.logs))
    times_us: Array = kind.formula(figures, chip(gpu), rows) * factors
    return times_us


def errors(times: Array, rows: Array) -> dict[str, float]:
    """Absolute relative errors."""
    relative = np.abs(times / rows[:, -1] - 1)
    keys = {"median": 0.5, "p90": 0.9, "p95": 0.95}
    return {"rows": len(rows)} | {name: float(np.quantile(relative, share)) for name, share in keys.items()}


def parts(kind: Kind, gpu: str, rows: Array) -> Array:
    """Which of four parts a row is in. Where devices share constants and curve, each loses other combinations at a
    time, as in the sealed rows."""
    key = rows[:, list(kind.split)]
    if not kind.own_constants:
        return fit.fold(key)
    _, index = np.unique(key, axis=0, return_inverse=True)
    return (index.reshape(-1) + list(DEVICES).index(gpu)) % 4


def held_out(kind: Kind, tables: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """By device, and of all its rows together: shapes the fit did not see. One part of four; of the few combinations
    of collectives each part in turn."""
    where = {gpu: parts(kind, gpu, rows) for gpu, rows in tables.items()}
    times: dict[str, list[Array]] = {gpu: [] for gpu in tables}
    unseen: dict[str, list[Array]] = {gpu: [] for gpu in tables}
    for part in range(4 if kind.own_constants else 1):
        fits = fitted(kind, {gpu: rows[where[gpu] != part] for gpu, rows in tables.items()})
        for gpu, rows in tables.items():
            unseen[gpu].append(rows[where[gpu] == part])
            times[gpu].append(predicted(kind, fits[gpu], gpu, unseen[gpu][-1]))
    joined = {gpu: (np.concatenate(times[gpu]), np.concatenate(unseen[gpu])) for gpu in tables}
    by_gpu = {gpu: errors(*both) for gpu, both in joined.items()}
    every = [np.concatenate(side) for side in zip(*joined.values(), strict=True)]
    return by_gpu | {"all": errors(*every)}


def left_out(kind: Kind, tables: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """By device, and of all together: served by its stand-in, fitted without a row of this device."""
    times = {}
    alone = None if kind.own_constants else constants(kind, tables)
    for gpu, rows in tables.items():
        candidates = (STAND_INS[gpu], "H200-SXM", "H100-SXM-80", "GB200")
        source = next(candidate for candidate in candidates if candidate in tables and candidate != gpu)
        others = {other: table for other, table in tables.items() if other != gpu}
        fits = fitted(kind, others, alone, source)
        times[gpu] = predicted(kind, fits[source], gpu, rows, source)
    by_gpu = {gpu: errors(times[gpu], rows) for gpu, rows in tables.items()}
    every = np.concatenate(list(times.values())), np.concatenate(list(tables.values()))
    return by_gpu | {"all": errors(*every)}


def written(fits: Mapping[str, Mapping[str, Fitted]], software: Mapping[str, Mapping[str, str]]) -> None:
    """Into the package, a file for each device; operations that were not fitted stay as they are."""
    DATA.mkdir(exist_ok=True)
    for gpu, preset in DEVICES.items():
        name = presets.device(preset).name
        path = DATA / f"{name}.json"
        operations = json.loads(path.read_text(encoding="utf-8"))["operations"] if path.is_file() else {}
        for kind in KINDS:
            if gpu in fits.get(kind.name, {}):
                operations[kind.name] = _stored_kind(kind, fits[kind.name][gpu], software[kind.name][gpu])
        parts = ",\n".join(_text(kind.name, operations[kind.name]) for kind in KINDS if kind.name in operations)
        head = f'{{\n"device": "{name}",\n"source": "{SOURCE}",\n"operations": {{\n'
        path.write_text(head + parts + "\n}\n}\n", encoding="utf-8")


def _stored_kind(kind: Kind, constants_by_gpu: Fitted, software: str) -> dict[str, Any]:
    lines = np.rint(1000 * constants_by_gpu.logs).astype(int).reshape(-1, len(kind.axes[-1])).tolist()
    figures = {name: float(f"{value:.4g}") for name, value in constants_by_gpu.figures.items()}
    return {"software": software, "figures": figures, "axes": [list(axis) for axis in kind.axes], "per_mille": lines}


def _text(name: str, operation: Mapping[str, Any]) -> str:
    """JSON with a line for each row of the curve."""
    *fields, rows = ((key, json.dumps(operation[key], separators=(",", ":"))) for key in operation)
    lines = [f'"{key}": {text}' for key, text in fields]
    return f'"{name}": {{\n' + ",\n".join([*lines, f'"{rows[0]}": ' + rows[1].replace("],[", "],\n[")]) + "\n}"


def table(scores: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> list[str]:
    """A line for each operation and device."""
    lines = [
        "| operation | device | held out: rows | median | 90 % | 95 % | device left out: median | 95 % |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, both in scores.items():
        for gpu, held in both["held_out"].items():
            left = both["left_out"].get(gpu)
            cells = [f"{100 * held[key]:.1f}" for key in ("median", "p90", "p95")]
            cells += [f"{100 * left[key]:.1f}" for key in ("median", "p95")] if left else ["", ""]
            lines.append(f"| {name} | {gpu} | {int(held['rows'])} | " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    """Fit, score, print; with --write also put the fit to all rows into the package."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--only", default="", help="operations whose name holds this")
    for name in ("write", "page", "json"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    tables_folder = folder(options.folder)
    if tables_folder is None or not (tables_folder / KINDS[0].file).is_file():
        print(HOW, file=sys.stderr)
        return 2
    kinds = [kind for kind in KINDS if options.only in kind.name]
    tables = {kind.name: rows_of(kind, tables_folder) for kind in kinds}
    if options.write:
        fits = {kind.name: fitted(kind, tables[kind.name]) for kind in kinds}
        written(fits, {kind.name: software_of(kind, tables_folder) for kind in kinds})
    scores = {
        kind.name.replace(".", "-"): {
            "held_out": held_out(kind, tables[kind.name]),
            "left_out": left_out(kind, tables[kind.name]),
        }
        for kind in kinds
    }
    print(json.dumps(scores, indent=1) if options.json else "\n".join(table(scores)))
    if options.page:
        stamp = f"Scored on {time.strftime('%Y-%m-%d', time.gmtime())} with numpy {np.__version__}."
        PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), {"kernels": [stamp, "", *table(scores)]}), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
