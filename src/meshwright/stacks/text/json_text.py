"""Options in JSON. It has no comments, so meanings stand elsewhere."""

import json
import re
from collections.abc import Sequence
from typing import Any

from meshwright.spec.errors import PlanError
from meshwright.stacks.text.option_text import Entry, Setting, flat, nested


def write(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """The options as one document; the title is left out."""
    return json.dumps(_values(nested(settings)), indent=2) + "\n"


def _values(found: Any) -> Any:
    return {key: _values(value) for key, value in found.items()} if isinstance(found, dict) else found.value


def read(text: str) -> list[Entry]:
    """Every option, its line found by its last name; PlanError where this is no JSON object."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"line {error.lineno}: no JSON ({error.msg})") from None
    if not isinstance(document, dict):
        raise PlanError("line 1: no JSON object")
    return [Entry(key=key, value=value, line=line_of(text, key)) for key, value in flat(document)]


def line_of(text: str, key: str) -> int:
    """The line where the names of a dotted key stand one after another; 0 = nowhere."""
    at = 0
    for name in key.split("."):
        found = re.compile(rf'["\[.\s]?\b{re.escape(name)}\b["\]]?').search(text, at)
        if found is None:
            return 0
        at = found.start()
    return text.count("\n", 0, at + 1) + 1
