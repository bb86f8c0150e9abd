"""Kernels and whole steps on one GPU, beside plain code, the compiler, torch's own kernels, Liger and transformers.

    python -m benchmarks.gpu [--minutes 10] [--out docs/benchmarks]
    python -m benchmarks.gpu --part kernels|rivals|steps|serve|quantized|http   # at most nine minutes each, one page

Needs torch and Triton; liger_kernel, transformers and vLLM take part where they are installed. Writes
OUT/gpu_<hardware>_<date>.json and the page made of it; parts of one commit and day are one file. Without a GPU it ends
with status 2. `--device cpu --tiny` runs the same program at toy size on a CPU, for its tests: such figures say
nothing, and are written only where --out asks.
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

from benchmarks.gpu import (
    ceilings,
    engine_steps,
    hardware,
    http_loads,
    kernel_rows,
    quantized_cases,
    serve_loads,
    whole_steps,
)
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.engine_steps import ENGINE_STEPS, TINY_ENGINE_STEPS, EngineStep
from benchmarks.gpu.entries import Entry, entries
from benchmarks.gpu.errors import reason
from benchmarks.gpu.http_loads import HTTP, TINY_HTTP, HttpEntry
from benchmarks.gpu.page import page
from benchmarks.gpu.serve_loads import QUANTIZED, SERVE, TINY_QUANTIZED, TINY_SERVE, ServeEntry
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
ENGINE_STEP_S = 22.0
"""What a row of the engine alone takes, compilation included."""
PART_MINUTES = 9.0
"""Machines are lent for ten minutes."""
PARTS = ("kernels", "rivals", "steps", "serve", "quantized", "http")
ROWS = ("kernels", "steps", "engine_steps", "serving", "http")
"""Lists of rows in a document."""
NAMING = (
    "operation", "model", "layers", "size", "dtype", "sequence", "rows", "micro_batch", "accumulation", "words",
    "scheme", "load",
)  # fmt: skip
"""Keys of a row that say what was measured."""
OPTIONAL = {"liger_kernel": "Liger", "transformers": "transformers"}
AnyEntry = Entry | StepEntry | EngineStep | ServeEntry | HttpEntry


def part_of(entry: AnyEntry) -> str:
    """Which of PARTS a row belongs to."""
    if isinstance(entry, HttpEntry):
        return "http"
    if isinstance(entry, ServeEntry):
        return "quantized" if entry.scheme or entry in QUANTIZED else "serve"
    if isinstance(entry, Entry):
        return "quantized" if entry.build.__module__ == quantized_cases.__name__ else "kernels"
    return "steps" if isinstance(entry, EngineStep) else "rivals"


def expected_s(entry: AnyEntry) -> float:
    """What a row is thought to take."""
    if isinstance(entry, StepEntry | ServeEntry | HttpEntry):
        return entry.expected_s
    return ENGINE_STEP_S if isinstance(entry, EngineStep) else KERNEL_S


def rows_of(part: str, *, tiny: bool) -> list[AnyEntry]:
    """All rows of a part; of none, those of kernels, of quantized products and beside rivals."""
    chosen: list[AnyEntry] = [*entries(tiny), *(TINY_STEPS if tiny else STEPS)]
    if not part:
        return chosen
    chosen += TINY_ENGINE_STEPS if tiny else ENGINE_STEPS
    chosen += [*TINY_SERVE, *TINY_QUANTIZED, *TINY_HTTP] if tiny else [*SERVE, *QUANTIZED, *HTTP]
    return [entry for entry in chosen if part_of(entry) == part]


class Bench:
    """A run: where, for how long, and what came of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, pick_device() if options.device == "cuda" else torch.device("cpu")
        self.timer: Timer = timer_of(self.device)
        self.budget = Budget(options.minutes)
        self.skip = {word.strip().lower() for word in options.skip.split(",") if word.strip()}
        self.kernels: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.engine_steps: list[dict[str, Any]] = []
        self.serving: list[dict[str, Any]] = []
        self.http: list[dict[str, Any]] = []
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
                kind, rows, make = "step", self.steps, partial(self._step, entry, best)
            elif isinstance(entry, EngineStep):
                seconds = 0.1 if self.options.tiny else STEPS_S / 2
                make = partial(engine_steps.row, entry, self.device, self.timer, seconds=seconds)
                kind, rows = "engine step", self.engine_steps
            elif isinstance(entry, ServeEntry):
                make = partial(serve_loads.row, entry, self.device, self.timer, self.budget.late)
                kind, rows = "serving", self.serving
            elif isinstance(entry, HttpEntry):
                make = partial(http_loads.row, entry, self.device, self.timer, self.budget.late)
                kind, rows = "HTTP", self.http
            else:
                kind, rows, make = "kernel", self.kernels, partial(self._kernel, entry, best)
            self._within_budget(kind, entry.name, expected_s(entry), rows, make)
        return {
            "what": "gpu", "machine": machine, "date": date.today().isoformat(), "command": hardware.command(),
            "tiny": self.options.tiny, "minutes": self.options.minutes, "ceilings": best.document(),
            "kernels": self.kernels, "steps": self.steps, "engine_steps": self.engine_steps, "serving": self.serving,
            "http": self.http,
            "left_out": self.budget.left_out,
            "absent": list(self._absent()), "broken": self.broken,
            "took_s": time.monotonic() - started,
        }  # fmt: skip

    def _ordered(self) -> list[AnyEntry]:
        """Most important first. Those of one rank stay as they are listed."""
        words = [word.strip() for word in self.options.only.split(",")]
        rows = rows_of(self.options.part, tiny=self.options.tiny)
        chosen = [entry for entry in rows if any(word in entry.name for word in words)]
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
        missing = chooser.why_unavailable(self.device)
        if missing:
            yield f"Triton's kernels: {missing}"
        if self.skip:
            yield f"by --skip: {', '.join(sorted(self.skip))}"


def merged(before: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """One document of two runs of a day: rows of `found` in place of all of its kinds, and those of other kinds that
    `before` has; what was left out, of both. Of another commit nothing is taken over."""
    if before["machine"]["commit"] != document["machine"]["commit"] or before["tiny"] != document["tiny"]:
        return document
    kinds = {kind: _names(document.get(kind, [])) for kind in ROWS}
    rows = {
        kind: [*(row for row in before.get(kind, []) if _name(row) not in kinds[kind]), *document.get(kind, [])]
        for kind in ROWS
    }
    lists = {key: list(dict.fromkeys([*before[key], *document[key]])) for key in ("left_out", "absent", "broken")}
    commands = dict.fromkeys([*before["command"].split("; "), document["command"]])
    summed = {key: before[key] + document[key] for key in ("minutes", "took_s")}
    return {**document, **rows, **lists, **summed, "command": "; ".join(commands)}


def _name(row: dict[str, Any]) -> str:
    """What tells a row from all others of its kind."""
    return json.dumps([*map(row.get, NAMING), list(row.get("loads", ()))])


def _names(rows: list[dict[str, Any]]) -> set[str]:
    return {_name(row) for row in rows}


def written(document: dict[str, Any], out: Path, *, part: str = "") -> Path:
    """The JSON and its page. A part joins what is there of the same commit and day."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"gpu_{document['machine']['hardware']}_{document['date']}.json"
    if part and path.is_file():
        document = merged(json.loads(path.read_text("utf-8")), document)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(document), encoding="utf-8")
    return path.with_suffix(".md")


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--minutes", type=float, help=f"what the run may take (default: 10, of a part {PART_MINUTES:g})"
    )
    parser.add_argument("--part", default="", choices=PARTS, help="only these rows; parts of a day share a page")
    parser.add_argument("--out", type=Path, help="folder of the JSON and the page (default: docs/benchmarks)")
    parser.add_argument("--skip", default="", help="contestants whose name holds one of these words: compiled,liger")
    parser.add_argument("--only", default="", help="rows whose name holds one of these words: rms norm,step")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="of kernels and steps")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for the tests of this program")
    parser.add_argument("--page", type=Path, metavar="JSON", help="write the page of a finished run again")
    options = parser.parse_args(words)
    options.minutes = (PART_MINUTES if options.part else 10.0) if options.minutes is None else options.minutes
    return options


def main(words: Sequence[str] | None = None) -> int:
    """0: the run was written. 2: there is no GPU, or toy figures were about to be written."""
    options = parsed(words)
    if options.page:
        options.page.with_suffix(".md").write_text(page(json.loads(options.page.read_text("utf-8"))), encoding="utf-8")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu: no CUDA device here, and nothing to measure without one.", file=sys.stderr)
        return 2
    document = Bench(options).run()
    if options.out is None and (options.tiny or options.device == "cpu"):
        print(page(document))
        return 0
    print(written(document, options.out or PAGES, part=options.part))
    return 0


if __name__ == "__main__":
    sys.exit(main())
