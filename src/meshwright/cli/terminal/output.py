"""Where verbs print: people's text through rich, programs' text as one JSON document."""

import json
import sys
from typing import TYPE_CHECKING, Any

from meshwright.api.documents import plain

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
