"""How far every fast path is from fp64, beside plain code of the same dtype.

    python -m benchmarks.kernel_errors [--json] [--tiny] [--device cuda]

An error is that of a result or a gradient, relative, in Euclidean norms. The ratio of two errors has a bar: 1.05 for
passes over rows, 1.2 for the gradient of the head in linear cross-entropy, 2 for attention. On a CPU both forms of a
16-bit product are tried, native and widened to fp32, whichever the machine would take itself. Triton's kernels run in
Triton's interpreter there, in a process of its own, at small sizes, in fp16: it rounds bf16 wrongly. In fp32 an error
of 1e-6 is enough: `largest` is of 16-bit rows, `single_error` the largest error of the others.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.case import BARS, SINGLE
from benchmarks.gpu.entries import MODEST, TINY, Entry, entries
from benchmarks.gpu.errors import judged
from meshwright import compat
from meshwright.kernels.chooser import dtype_name

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROOT = Path(__file__).resolve().parent.parent


def rows(
    chosen: list[Entry], device: torch.device, dtypes: tuple[torch.dtype, ...], how: str
) -> Iterator[dict[str, Any]]:
    """One for each implementation of each operation and dtype."""
    for entry in chosen:
        made = {case.dtype: case for case in (entry.judged(dtype, device) for dtype in dtypes)}  # some have fp32 only
        for case in made.values():
            verdict = judged(case, case.ours, device)
            for name, contestant in verdict["contestants"].items():
                yield {
                    "operation": case.operation, "size": case.size, "dtype": dtype_name(case.dtype), "by": name, "how":
                    how, "plain": verdict["plain"], **contestant,
                }  # fmt: skip


def here(tiny: bool, device: torch.device) -> list[dict[str, Any]]:
    """All rows that this process can make."""
    chosen = TINY if tiny else MODEST if device.type == "cpu" else entries(False)
    if device.type != "cpu":
        return list(rows(chosen, device, DTYPES, "device"))
    collected: list[dict[str, Any]] = []
    for native in (True, False):
        with patch.object(compat, "cpu_multiplies", lambda dtype, native=native: native):
            dtypes = DTYPES if native else DTYPES[:2]
            collected += rows(chosen, device, dtypes, "16-bit products" if native else "widened products")
    return collected


def interpreted() -> list[dict[str, Any]]:
    """Triton's kernels, in a process in which its interpreter is on."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.kernel_errors", "--interpreted"], cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    printed: list[dict[str, Any]] = json.loads(finished.stdout)
    return printed


def in_the_interpreter() -> list[dict[str, Any]]:
    """Its rows."""
    collected = rows(TINY, torch.device("cpu"), (torch.float16,), "interpreter")
    return [row for row in collected if row["by"] == "ours, Triton"]


def summed_up(judged_rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Largest ratio of each kind, and the rows that miss a bar."""
    largest = {kind: 0.0 for kind in BARS}
    for row in judged_rows:
        for kind, ratio in row.get("ratios", {}).items():
            if row["dtype"] != "fp32":
                largest[kind] = max(largest[kind], ratio)
    exact = [row for row in judged_rows if row["dtype"] == "fp32" and "errors" in row and max(row["plain"]) <= SINGLE]
    single = [max(row["errors"]) for row in exact]  # what rounds to fewer bits by itself is judged by its ratio
    missed = [row for row in judged_rows if not row.get("holds")]
    return {
        "single_error": max(single, default=0.0),
        "largest": {kind.replace(" ", "_"): ratio for kind, ratio in largest.items()}, "checked": len(judged_rows),
        "missed": len(missed), "missing": missed, "rows": judged_rows,
    }  # fmt: skip


def table(summary: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield "| operation | dtype | by | how | largest ratio | error |\n|---|---|---|---|---|---|"
    for row in summary["rows"]:
        if "failed" in row:
            yield f"| {row['operation']} | {row['dtype']} | {row['by']} | {row['how']} | failed | {row['failed']} |"
            continue
        ratios = ", ".join(f"{ratio:.3f} ({kind})" for kind, ratio in row["ratios"].items())
        mark = "" if row["holds"] else " **above the bar**"
        yield (
            f"| {row['operation']} | {row['dtype']} | {row['by']} | {row['how']} | {ratios}{mark} "
            f"| {max(row['errors']):.1e} |"
        )


def main() -> int:
    """0: every bar holds, or the figures are for a program to judge; 1: one does not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="the sizes of a test")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--interpreted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.interpreted:
        print(json.dumps(in_the_interpreter()))
        return 0
    judged_rows = here(options.tiny, torch.device(options.device))
    summary = summed_up(judged_rows + (interpreted() if options.device == "cpu" else []))
    print(json.dumps(summary) if options.json else "\n".join(table(summary)))
    return 1 if summary["missed"] and not options.json else 0


if __name__ == "__main__":
    sys.exit(main())
