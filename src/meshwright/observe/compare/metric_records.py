"""Records of metrics.jsonl, validated when they are read: the file may come from anywhere."""

from pathlib import Path
from typing import Any

from meshwright.spec.errors import RunError
from meshwright.store.run_folder import MetricsLog

Record = dict[str, Any]
STEP = ("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "seconds", "step_seconds")
"""Numbers in every step's record."""
EVALUATION = ("loss",)
"""Numbers in every evaluation's record."""
OPTIONAL = ("data_wait_seconds", "mfu_causal", "mfu_full", "hfu", "bits_per_byte")
"""Numbers that a record may lack, or have as null."""
MAY_OVERFLOW = ("loss", "grad_norm")
"""Numbers of a step that may be infinite or NaN in training, by overflow of fp16."""
LARGEST = 2**63


def records(path: Path) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """Return steps and evaluations. Raises RunError naming the first record that is damaged or of another program."""
    rows = MetricsLog.read(path)
    steps = tuple(_check(row, STEP, path) for row in rows if "kind" not in row)
    evaluations = tuple(_check(row, EVALUATION, path) for row in rows if row.get("kind") == "eval")
    return steps, evaluations


def _check(record: Record, names: tuple[str, ...], path: Path) -> Record:
    step, may_overflow = record.get("step"), names is STEP
    wrong = [name for name in names if not _is_number(record.get(name), may_overflow and name in MAY_OVERFLOW)]
    wrong += [name for name in OPTIONAL if record.get(name) is not None and not _is_number(record[name])]
    batch = record.get("global_batch", 1)
    if type(step) is not int or not 0 <= step < LARGEST:
        what = "a record has no step"
    elif wrong:
        what = f"the record of step {step} has no number {wrong[0]}"
    elif may_overflow and (type(batch) is not int or not 1 <= batch < LARGEST):
        what = f"the record of step {step} has no global_batch of 1 or more"
    else:
        return record
    raise RunError(f"{path} is damaged or of another program: {what}")


def _is_number(value: Any, may_overflow: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < LARGEST or (may_overflow and isinstance(value, float))
