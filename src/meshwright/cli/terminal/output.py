"""Where verbs print: people's text through rich, programs' text as one JSON document."""

import json
import math
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console(*, json: bool = False) -> "Console":
    """Where people read: plain text when not a terminal, no colour with NO_COLOR set.

    With --json stdout belongs to the document; then people are on stderr, and where nobody is it is quiet.
    """
    from rich.console import Console

    quiet = json and not sys.stderr.isatty()
    found = Console(stderr=json, quiet=quiet, highlight=False)
    found.soft_wrap = not found.is_terminal  # a file's lines are never broken
    return found


def print_json(document: Any) -> None:
    """One JSON document and a newline on stdout; a dataclass is its fields, a number that is none becomes null."""
    json.dump(plain(document), sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def plain(value: Any) -> Any:
    """What JSON can hold: a dataclass is its fields, a number that is none becomes null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
