"""The records of metrics.jsonl, checked once at the door: what stands in a file may come from anywhere."""

from pathlib import Path
from typing import Any

from meshwright.spec.errors import RunError
from meshwright.store.run_folder import MetricsLog

Record = dict[str, Any]
STEP = ("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "seconds", "step_seconds")
"""Numbers that every step's record has."""
EVALUATION = ("loss",)
"""Numbers that every evaluation's has."""
OPTIONAL = ("data_wait_seconds", "mfu_causal", "mfu_full", "hfu", "bits_per_byte")
"""Numbers that a record may lack, or have as null."""
WILD = ("loss", "grad_norm")
"""Those of a step that training itself may have seen as no number: overflow of fp16."""
LARGEST = 2**63


def records(path: Path) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """Steps and evaluations. RunError, one line: the first that is damaged or of another program."""
    found = MetricsLog.read(path)
    steps = tuple(_checked(one, STEP, path) for one in found if "kind" not in one)
    evaluations = tuple(_checked(one, EVALUATION, path) for one in found if one.get("kind") == "eval")
    return steps, evaluations


def _checked(record: Record, names: tuple[str, ...], path: Path) -> Record:
    step, wild = record.get("step"), names is STEP
    wrong = [name for name in names if not _is_number(record.get(name), wild and name in WILD)]
    wrong += [name for name in OPTIONAL if record.get(name) is not None and not _is_number(record[name])]
    batch = record.get("global_batch", 1)
    if type(step) is not int or not 0 <= step < LARGEST:
        what = "a record has no step"
    elif wrong:
        what = f"the record of step {step} has no number {wrong[0]}"
    elif wild and (type(batch) is not int or not 1 <= batch < LARGEST):
        what = f"the record of step {step} has no global_batch of 1 or more"
    else:
        return record
    raise RunError(f"{path} is damaged or of another program: {what}")


def _is_number(value: Any, wild: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < LARGEST or (wild and isinstance(value, float))
