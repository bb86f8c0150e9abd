"""Where verbs print: people's text through rich, programs' text as one JSON document."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any

from meshwright.api.documents import plain

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE_S = 2.0
"""Seconds for which a verb may be silent. A refusal comes sooner, and then no line precedes it."""


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


@contextmanager
def explain_wait(line: str) -> Iterator[None]:
    """Print `line` on stderr once the block has taken PATIENCE_S seconds, so that nobody takes it for hung."""
    timer = Timer(PATIENCE_S, print, [line], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
