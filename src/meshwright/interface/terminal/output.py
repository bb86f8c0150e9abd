"""Output of verbs: text for people through rich, one JSON document for programs."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any

from meshwright.interface.answers.answer import plain

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE_S = 2.0
"""Seconds for which a verb may be silent. Errors come sooner, and then no line precedes them."""


def console(*, json: bool = False) -> "Console":
    """Return the console for people: plain text on anything but a terminal, no colour with NO_COLOR.

    With --json, stdout belongs to the document. The console then writes to stderr, and is silent unless that is a
    terminal.
    """
    from rich.console import Console

    quiet = json and not sys.stderr.isatty()
    screen = Console(stderr=json, quiet=quiet, highlight=False)
    screen.soft_wrap = not screen.is_terminal  # a file's lines are never broken
    return screen


def print_json(document: Any) -> None:
    """Print one JSON document and a newline. Dataclasses become their fields, NaN and infinity null."""
    json.dump(plain(document), sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


@contextmanager
def explain_wait(line: str) -> Iterator[None]:
    """Print `line` on stderr once the block has taken PATIENCE_S seconds, else people take it for hung."""
    timer = Timer(PATIENCE_S, print, [line], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
