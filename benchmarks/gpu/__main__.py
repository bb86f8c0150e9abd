"""Kernels and whole steps on one GPU, beside plain code, the compiler, torch's own kernels, Liger and transformers.

    python -m benchmarks.gpu [--minutes 10] [--out docs/benchmarks]

Needs torch and Triton; liger_kernel and transformers take part where they are installed. Writes
OUT/gpu_<hardware>_<date>.json and the page made of it. Without a GPU it ends with status 2. `--device cpu --tiny` runs
the same program at toy size on a CPU, for its tests: such figures say nothing, and are written only where --out asks.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import ceilings, hardware, kernel_rows, whole_steps
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.entries import Entry, entries
from benchmarks.gpu.errors import reason
from benchmarks.gpu.page import page
from benchmarks.gpu.timing import Timer, timer_of
from benchmarks.gpu.whole_steps import STEPS, TINY_STEPS, StepEntry
from meshwright.kernels import chooser
from meshwright.training.device import pick_device, prepare

PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KERNEL_S = 14.0
"""What a kernel's row takes: sets of inputs, two compilations, turns, errors."""
TURNS_S, STEPS_S = 1.5, 8.0
"""Measured seconds of a kernel's row, and of each contestant's steps."""
OPTIONAL = {"liger_kernel": "Liger", "transformers": "transformers"}


class Bench:
    """A run: where, for how long, and what came of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, pick_device() if options.device == "cuda" else torch.device("cpu")
        self.timer: Timer = timer_of(self.device)
        self.budget = Budget(options.minutes)
        self.skip = {word.strip().lower() for word in options.skip.split(",") if word.strip()}
        self.kernels: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.broken: list[str] = []
        self.dtype = DTYPES[options.dtype]
        self.precision = options.dtype if self.device.type == "cuda" else "fp32"

    def run(self) -> dict[str, Any]:
        """Everything that the time is enough for, as a document."""
        started = time.monotonic()
        prepare(self.device, self.precision)
        dtypes = (torch.float32, self.dtype)
        best = ceilings.measure(self.device, self.timer, dtypes, self.options.tiny)
        machine = hardware.described(self.device)
        for entry in self._ordered():
            if isinstance(entry, StepEntry):
                make = partial(self._step, entry, best)
                self._within_budget("step", entry.name, entry.expected_s, self.steps, make)
            else:
                self._within_budget("kernel", entry.name, KERNEL_S, self.kernels, partial(self._kernel, entry, best))
        return {
            "what": "gpu", "machine": machine, "date": date.today().isoformat(), "command": hardware.command(),
            "tiny": self.options.tiny, "minutes": self.options.minutes, "ceilings": best.document(),
            "kernels": self.kernels, "steps": self.steps, "left_out": self.budget.left_out,
            "absent": list(self._absent()), "broken": self.broken,
            "took_s": time.monotonic() - started,
        }  # fmt: skip

    def _ordered(self) -> list[Entry | StepEntry]:
        """Most important first. Those of one rank stay as they are listed."""
        some = [word.strip() for word in self.options.only.split(",")]
        found: list[Entry | StepEntry] = [*entries(self.options.tiny), *(TINY_STEPS if self.options.tiny else STEPS)]
        chosen = [entry for entry in found if any(word in entry.name for word in some)]
        return sorted(chosen, key=lambda entry: entry.rank)

    def _kernel(self, entry: Entry, best: ceilings.Ceilings) -> dict[str, Any]:
        return kernel_rows.row(
            entry, self.dtype, self.device, self.timer, best, seconds=0.02 if self.options.tiny else TURNS_S,
            skip=self.skip, late=self.budget.late,
        )  # fmt: skip

    def _step(self, entry: StepEntry, best: ceilings.Ceilings) -> dict[str, Any]:
        return whole_steps.row(
            entry, self.device, self.timer, best, seconds=0.1 if self.options.tiny else STEPS_S, skip=self.skip,
            late=self.budget.late, precision=self.precision,
        )  # fmt: skip

    def _within_budget(
        self, kind: str, name: str, expected_s: float, rows: list[dict[str, Any]], make: Callable[[], dict[str, Any]]
    ) -> None:
        """A row, if there is time for it. One that fails as a whole does not end the run."""
        if not self.budget.has(kind, name, expected_s):
            return
        print(f"{self.budget.left_s / 60:5.1f} minutes left: {name}", file=sys.stderr, flush=True)
        start = time.monotonic()
        try:
            rows.append(make())
        except Exception as failure:
            self.broken.append(f"{name}: {reason(failure)}")
        self.budget.took(kind, expected_s, time.monotonic() - start)

    def _absent(self) -> Iterator[str]:
        for package, name in OPTIONAL.items():
            if find_spec(package) is None:
                yield f"{name}: `{package}` is not installed"
        missing = chooser.unavailable(self.device)
        if missing:
            yield f"Triton's kernels: {missing}"
        if self.skip:
            yield f"by --skip: {', '.join(sorted(self.skip))}"


def written(found: dict[str, Any], out: Path) -> Path:
    """The JSON and its page."""
    out.mkdir(parents=True, exist_ok=True)
    place = out / f"gpu_{found['machine']['hardware']}_{found['date']}.json"
    place.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    place.with_suffix(".md").write_text(page(found), encoding="utf-8")
    return place.with_suffix(".md")


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="what the run may take")
    parser.add_argument("--out", type=Path, help="folder of the JSON and the page (default: docs/benchmarks)")
    parser.add_argument("--skip", default="", help="contestants whose name holds one of these words: compiled,liger")
    parser.add_argument("--only", default="", help="rows whose name holds one of these words: rms norm,step")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="of kernels and steps")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for the tests of this program")
    parser.add_argument("--page", type=Path, metavar="JSON", help="write the page of a finished run again")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """0: the run was written. 2: there is no GPU, or toy figures were about to be written."""
    options = parsed(words)
    if options.page:
        options.page.with_suffix(".md").write_text(page(json.loads(options.page.read_text("utf-8"))), encoding="utf-8")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu: no CUDA device here, and nothing to measure without one.", file=sys.stderr)
        return 2
    found = Bench(options).run()
    if options.out is None and (options.tiny or options.device == "cpu"):
        print(page(found))
        return 0
    print(written(found, options.out or PAGES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
