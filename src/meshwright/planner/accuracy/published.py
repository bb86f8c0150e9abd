"""Published measurements: a row of a CSV -> the plan that was run, its software, and the measured figures.

Columns are those of the project's tables of published runs (step time, tokens/s, peak memory, status) and of published
memory (quantity, value, unit). Nothing is guessed: for an incomplete row `read` returns the reason instead. Inferences
(a batch, an interleaving) are listed in docs/accuracy.md. Sources are grouped by family and by cluster, for the lines
of accuracy tables and calibrations.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.planner.accuracy.flop_conventions import convention_of
from meshwright.planner.accuracy.published_run import number, plan_of
from meshwright.planner.accuracy.published_stacks import RUN_TWICE
from meshwright.planner.cost.stack import Stack
from meshwright.planner.step.predict import predict
from meshwright.spec.errors import DataError, MeshwrightError
from meshwright.spec.plan.plan import Plan

UNITS = {"GiB": 2.0**30, "GB": 2.0**30, "%": 0.01}
"""Unit -> bytes. Published peaks are torch's, printed with either name and meaning 2**30."""
PARTS = {
    "peak memory per GPU": "peak", "peak active memory": "peak", "activations": "activations",
    "params+grads+optimizer": "states", "activation bytes relative to TP-only no-recompute": "activation share",
}  # fmt: skip
"""Column `quantity` of a table of memory -> the part of a prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One measured run."""

    source: str
    id: str
    """Number of the row in its table, or line of the file if the table has no numbers."""
    plan: Plan
    stack: Stack
    step_s: float
    """Measured seconds of a step. 0 = not printed."""
    derived: bool
    """True if the step time follows from a printed FLOP rate by the formula of its source."""
    peak_bytes: float
    """Measured peak. 0 = not printed."""
    out_of_memory: bool
    part: Literal["", "peak", "activations", "states", "activation share"] = ""
    """The part of a rank's memory that `part_value` measures. Empty = none."""
    part_value: float = 0.0
    """Bytes, or the share."""
    columns: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A row that does not say enough, and the reason."""

    source: str
    reason: str
    columns: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRow:
    """A published row and the planner's prediction for it."""

    row: PublishedRow
    step_s: float
    part_value: float
    """Predicted bytes (or share) of the row's `part`."""
    fits: bool
    seen: bool
    """True if a calibration was fitted to this row: then it counts in no error."""

    @property
    def step_error(self) -> float | None:
        """Relative error. None = the row has no time."""
        return self.step_s / self.row.step_s - 1 if self.row.step_s and not self.seen else None

    @property
    def memory_error(self) -> float | None:
        """Relative error. None = the row has no memory."""
        return self.part_value / self.row.part_value - 1 if self.row.part_value else None


def read(path: Path) -> Iterator[PublishedRow | Unreadable]:
    """Yield the rows of a file. Raises DataError when it is no such table."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file, strict=True)
            _check(path, set(table.fieldnames or ()))
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table: {getattr(error, 'strerror', None) or error}") from None
    if not rows:
        raise DataError(f"{path} has no rows under its header: there is nothing to score")
    for line, columns in enumerate(rows, start=2):
        yield _row(line, {name: value or "" for name, value in columns.items() if isinstance(name, str)})


def _check(path: Path, names: set[str]) -> None:
    runs = {"source", "framework", "model", "n_gpus", "gpu", "seq_len", "tp", "pp", "status"}
    memory = {"source", "framework", "model", "gpu", "quantity", "value", "unit"}
    if not (names >= runs or names >= memory):
        lacks = min(runs - names, memory - names, key=len)
        raise DataError(f"{path} is not a table of published runs: it lacks the columns {', '.join(sorted(lacks))}")


def _row(line: int, columns: dict[str, str]) -> PublishedRow | Unreadable:
    source = columns["source"] or "(no source)"
    try:
        part, part_value = _part(columns)
        plan, stack = plan_of(columns)
        if stack in RUN_TWICE and not predict(plan, stack).fits:
            stack = RUN_TWICE[stack]
        failed = bool(columns.get("status")) and columns["status"] != "ok"
        step_s, derived = (0.0, False) if failed or part else _step_s(columns, plan)
    except (ValueError, MeshwrightError) as error:
        return Unreadable(source=source, reason=str(error), columns=columns)
    if not failed and not part and not step_s and not part_value:
        return Unreadable(source=source, reason="gives no time, rate or memory", columns=columns)
    peak = 0.0 if failed or part else number(columns, "peak_mem_gb", 0.0) * UNITS["GiB"]
    return PublishedRow(
        source=source,
        id=columns.get("id") or f"line {line}",
        plan=plan,
        stack=stack,
        step_s=step_s,
        derived=derived,
        peak_bytes=part_value if part == "peak" else peak,
        out_of_memory=failed and "oom" in columns["status"].lower(),
        part=part or ("peak" if peak else ""),  # type: ignore[arg-type]  # checked where the columns are read
        part_value=part_value or peak,
        columns=columns,
    )


def _part(columns: dict[str, str]) -> tuple[str, float]:
    """Return (part, value) of a row of a table of memory, or ("", 0) for other rows."""
    if "quantity" not in columns:
        return "", 0.0
    quantity, unit, method = columns["quantity"], columns["unit"], columns.get("method", "")
    if columns["model"].startswith("kernel:"):
        raise ValueError("is a kernel alone, no training run")
    if method not in ("", "pretrain"):
        raise ValueError(f"method={_class(method)!r} is no training of all weights with plain AdamW")
    if quantity not in PARTS or unit.split()[0] not in UNITS:
        raise ValueError(f"quantity={quantity!r} in {unit!r} is no part of a prediction")
    return PARTS[quantity], number(columns, "value") * UNITS[unit.split()[0]]


def _class(method: str) -> str:
    words = ("inference", "lora", "adapter", "full")
    return next((word for word in words if word in method.lower()), method)


def _step_s(columns: dict[str, str], plan: Plan) -> tuple[float, bool]:
    """Return (seconds of a step, whether they follow from a FLOP rate)."""
    printed = number(columns, "step_time_s", 0.0)
    derived = "derived from formula" in columns.get("notes", "")
    if printed:
        return printed, derived
    tokens = plan.recipe.global_batch * plan.recipe.sequence
    rate = number(columns, "tok_s_gpu", 0.0)
    if rate:
        return tokens / (rate * plan.layout.world), False
    convention = convention_of(columns)
    return (convention.step_s(plan, columns) if convention else 0.0), True


def duplicate_of(row: PublishedRow | Unreadable) -> str:
    """Return the id of the row of runs that a row of memory repeats. Empty = none."""
    match = re.search(r"row id (\d+) in training_throughput", row.columns.get("notes", ""))
    return match[1] if match and "quantity" in row.columns else ""


FAMILIES = (
    (r"ground_truth_single", "vTrain single node"), (r"ground_truth_multi", "vTrain multi node"),
    (r"Aleph-Alpha", "Aleph Alpha"), (r"llm-foundry", "llm-foundry"),
    (r"Ultra-Scale Playbook benchmarks_interactive", "Ultra-Scale grid"), (r"Ultra-Scale", "Ultra-Scale curves"),
    (r"Megatron-Bridge", "Megatron-Bridge"), (r"NeMo.*long_sequence", "NeMo long sequence"),
    (r"NVIDIA/NeMo", "NeMo 24.07"),
    (r"examples/llama/README", "Megatron-LM llama README"), (r"model_table", "Megatron-Core 0.8 table"),
    (r"Narayanan", "Megatron 2021 table 1"), (r"Korthikanti.*Fig", "Korthikanti 2022 figures"),
    (r"Korthikanti", "Korthikanti 2022 table 5"), (r"Llama 3 Herd", "Llama 3 table 4"), (r"torchtitan", "torchtitan"),
    (r"fms-fsdp", "fms-fsdp"), (r"Primus", "Primus"), (r"maxtext", "MaxText"), (r"DeepSeek-V3", "DeepSeek-V3 report"),
    (r"mlcommons/training_results", "MLPerf"),
    (r"PaLM", "PaLM"), (r"litgpt", "litgpt"), (r"torchtune", "torchtune"), (r"Liger", "Liger kernels"),
)  # fmt: skip
"""(pattern in the column `source`, family). The first match counts. A source without one is its own family."""


def family_of(source: str) -> str:
    """Return the family of a source."""
    return next((name for pattern, name in FAMILIES if re.search(pattern, source)), source)


def cluster_of(row: PublishedRow) -> str:
    """Name the machine and software of a row: one publisher's runs on one kind of device."""
    return f"{family_of(row.source)}, {row.plan.cluster.device.name}"
