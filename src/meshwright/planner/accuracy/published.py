"""Published measurements: a row of a CSV -> the plan that was run, the software it ran on, what was measured.

Columns as in the project's tables of published runs (step time, tokens/s, peak memory, status) and of published memory
(quantity, value, unit). A row that does not say enough is not guessed at: `read` gives the reason instead. What is
read between the lines (a batch, an interleaving) is listed in docs/accuracy.md.
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
from meshwright.spec.plan import Plan

UNITS = {"GiB": 2.0**30, "GB": 2.0**30, "%": 0.01}
"""Published peaks are torch's, printed with either name and meaning 2**30 (research notes, section 8)."""
PARTS = {
    "peak memory per GPU": "peak", "peak active memory": "peak", "activations": "activations",
    "params+grads+optimizer": "states", "activation bytes relative to TP-only no-recompute": "activation share",
}  # fmt: skip
"""Column `quantity` of a table of memory -> which part of a prediction it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One measured run."""

    source: str
    id: str
    """Number of the row in its table; line of the file where the table has none."""
    plan: Plan
    stack: Stack
    step_s: float
    """0 = not given."""
    derived: bool
    """The step time follows from a printed FLOP rate by the formula of its source."""
    peak_bytes: float
    """0 = not given."""
    out_of_memory: bool
    part: Literal["", "peak", "activations", "states", "activation share"] = ""
    """Which part of a rank's memory `part_value` is; empty = none is given."""
    part_value: float = 0.0
    """Bytes; of a share the share."""
    columns: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A row that does not say enough, and why."""

    source: str
    reason: str
    columns: dict[str, str]


def read(path: Path) -> Iterator[PublishedRow | Unreadable]:
    """The rows of a file; DataError where it is no such table."""
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
        part, value = _part(columns)
        plan, stack = plan_of(columns)
        if stack in RUN_TWICE and not predict(plan, stack).fits:
            stack = RUN_TWICE[stack]
        failed = bool(columns.get("status")) and columns["status"] != "ok"
        step_s, derived = (0.0, False) if failed or part else _step_s(columns, plan)
    except (ValueError, MeshwrightError) as error:
        return Unreadable(source=source, reason=str(error), columns=columns)
    if not failed and not part and not step_s and not value:
        return Unreadable(source=source, reason="gives no time, rate or memory", columns=columns)
    peak = 0.0 if failed or part else number(columns, "peak_mem_gb", 0.0) * UNITS["GiB"]
    return PublishedRow(
        source=source,
        id=columns.get("id") or f"line {line}",
        plan=plan,
        stack=stack,
        step_s=step_s,
        derived=derived,
        peak_bytes=value if part == "peak" else peak,
        out_of_memory=failed and "oom" in columns["status"].lower(),
        part=part or ("peak" if peak else ""),  # type: ignore[arg-type]  # checked where the columns are read
        part_value=value or peak,
        columns=columns,
    )


def _part(columns: dict[str, str]) -> tuple[str, float]:
    """(part, value) of a row of a table of memory; ("", 0) of others."""
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
    """(seconds of a step, whether they follow from a FLOP rate)."""
    given = number(columns, "step_time_s", 0.0)
    derived = "derived from formula" in columns.get("notes", "")
    if given:
        return given, derived
    tokens = plan.recipe.global_batch * plan.recipe.sequence
    rate = number(columns, "tok_s_gpu", 0.0)
    if rate:
        return tokens / (rate * plan.layout.world), False
    convention = convention_of(columns)
    return (convention.step_s(plan, columns) if convention else 0.0), True


def duplicate_of(row: PublishedRow | Unreadable) -> str:
    """The id of the row of the table of runs that a row of the table of memory repeats; empty = none."""
    found = re.search(r"row id (\d+) in training_throughput", row.columns.get("notes", ""))
    return found[1] if found and "quantity" in row.columns else ""
