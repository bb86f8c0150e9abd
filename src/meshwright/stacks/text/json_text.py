"""Options in JSON. The form has no comments, so meanings are omitted."""

import json
import re
from collections.abc import Sequence
from typing import Any

from meshwright.spec.errors import PlanError
from meshwright.stacks.text.option_text import Entry, Setting, flat, nested


def write(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return the options as one document. The title is omitted."""
    return json.dumps(_values(nested(settings)), indent=2) + "\n"


def _values(tree: Any) -> Any:
    return {key: _values(value) for key, value in tree.items()} if isinstance(tree, dict) else tree.value


def read(text: str) -> list[Entry]:
    """Return every option with the line of its last name. Raises PlanError unless the text is a JSON object."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"line {error.lineno}: no JSON ({error.msg})") from None
    if not isinstance(document, dict):
        raise PlanError("line 1: no JSON object")
    return [Entry(key=key, value=value, line=line_of(text, key)) for key, value in flat(document)]


def line_of(text: str, key: str) -> int:
    """Return the line where the names of a dotted key follow each other. 0 = not in the text."""
    at = 0
    for name in key.split("."):
        match = re.compile(rf'["\[.\s]?\b{re.escape(name)}\b["\]]?').search(text, at)
        if match is None:
            return 0
        at = match.start()
    return text.count("\n", 0, at + 1) + 1
