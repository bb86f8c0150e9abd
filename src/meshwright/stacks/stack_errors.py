"""Prediction errors on published rows of each training software: the tables of docs/accuracy.md as data.

`python -m docs.stack_errors` writes published_errors.toml from that page. A test compares the two.
"""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.stacks.declaration.software import TrainingSoftware


@cache
def _errors() -> dict[str, Any]:
    text = files("meshwright.stacks").joinpath("published_errors.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["source"]  # type: ignore[no-any-return]  # a table of tables


def published_errors(software: TrainingSoftware) -> list[tuple[str, dict[str, Any]]]:
    """Return (source, row with rows, step, peaks, memory) for each source that the software was scored on."""
    return [(name, _errors()[name]) for name in software.measured if name in _errors()]


def sentences(software: TrainingSoftware) -> list[str]:
    """Return sentences on the known errors and on what cannot be predicted."""
    lines = []
    for name, row in published_errors(software):
        parts = []
        if row.get("step"):
            parts.append(f"step time {_mean(row['step'])} on {row['rows']} rows")
        if row.get("memory"):
            parts.append(f"memory {_mean(row['memory'])} on {row['peaks']} peaks")
        lines.append(f"Mean error on published rows of {name}: {', '.join(parts)}.")
    return lines + list(software.unknown)


def _mean(cell: str) -> str:
    return f"{cell.split(' / ')[0]}%"
