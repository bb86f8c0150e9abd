"""Text on a terminal and JSON on stdout.

Lines fit any width and break between words. Only verdicts have colours, and signs are those that the encoding has. A
program that asks for --json gets one document.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.interface.answers.answer import Answer

URL_OF: dict[str, str] = {}
"""Local path that a verb reads or writes -> the URL that it is a copy of, or goes to at the end (interface/urls.py)."""
NARROWEST, WIDEST = 60, 200
"""Narrowest and widest layout in columns. A narrower terminal breaks lines itself."""
COLOURS = {"green": "32", "yellow": "33", "red": "31"}
PATIENCE_S = 2.0
"""Seconds for which a verb may be silent. Errors come sooner, and then no line precedes them."""


def shown_path(path: object) -> str:
    """Return the name of a path for its user: its URL, or itself."""
    return URL_OF.get(str(path), str(path))


def width() -> int:
    """Return the columns of the terminal; of a file or pipe COLUMNS, else 80."""
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size((80, 24)).columns))


def coloured(text: str, colour: str) -> str:
    """Colour a verdict, unless NO_COLOR is set or stdout is no terminal with colours."""
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if plain else f"\x1b[1;{COLOURS[colour]}m{text}\x1b[0m"


def marked(lines: Iterable[str], word: str, colour: str) -> Iterator[str]:
    """Yield lines, with a word of the first one coloured."""
    first, *rest = lines
    yield first.replace(word, coloured(word, colour), 1)
    yield from rest


def wrapped(text: str | Sequence[str], columns: int, first: str = "", rest: str | None = None) -> Iterator[str]:
    """Yield lines of at most `columns` columns, broken between words. A longer word keeps its line to itself.

    `first` leads the first line, `rest` (by default as many blanks) the others. The items of a sequence are not broken,
    and stand three blanks apart.
    """
    words, between = (text.split(), " ") if isinstance(text, str) else (text, "   ")
    lead, rest = first, " " * len(first) if rest is None else rest
    # `used` is whether the line has a word yet. A word wider than the screen must not leave an empty line before it.
    line, used = lead, False
    for word in words:
        if used and len(line) + len(between) + len(word) > columns:
            yield line
            line, used = rest, False
        line += (between if used else "") + word
        used = True
    yield line.rstrip()


def continued(command: str, columns: int, lead: str) -> Iterator[str]:
    """Yield a shell command over several lines, ready to be pasted.

    Each line but the last ends in a backslash, and an option keeps its value on its line.
    """
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        # An option that still lacks its value has no blank.
        if parts and parts[-1].startswith("-") and " " not in parts[-1] and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    line = lead + parts[0]
    for part in parts[1:]:
        if len(line) + len(part) + len("  \\") > columns:
            yield f"{line} \\"
            line = f"{lead}  {part}"
        else:
            line += f" {part}"
    yield line


def folded(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines, wrapping those wider than the terminal with an indent of two columns.

    In files and pipes none is wrapped, unless COLUMNS is set.
    """
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    for line in lines:
        lead = line[: len(line) - len(line.lstrip())]
        if fixed and len(line) > width():
            yield from wrapped(line, width(), lead, lead + "  ")
        else:
            yield line


def aligned(rows: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    """Yield rows of equal length as lines, two blanks between columns, the first `left` columns aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width) for number, (cell, width) in enumerate(cells)
        )


def bar(share: float, cells: int = 20) -> str:
    """Draw the used share of a whole."""
    # An encoding without block characters would raise an error in the middle of an answer.
    full, empty = ("\u2588", "\u2591") if _unicode() else ("#", ".")
    used = min(cells, max(0, round(share * cells)))
    return full * used + empty * (cells - used)


def dot() -> str:
    """Return the separator between the parts of a headline."""
    return " \u00b7 " if _unicode() else ", "


def show(lines: Iterable[str]) -> None:
    """Print all lines."""
    for line in lines:
        print(line)


def _unicode() -> bool:
    return (sys.stdout.encoding or "").lower().startswith("utf")


def plus_minus(text: str) -> str:
    """Replace the plus-minus sign where the encoding lacks it."""
    return text if _unicode() else text.replace("\u00b1", "+-")


def printable(text: str) -> str:
    """Replace everything that could steer a terminal. Line ends and tabs stay."""
    from meshwright.data.tokens.text_stream import UNFINISHED

    return "".join(letter if letter.isprintable() or letter in "\n\t" else UNFINISHED for letter in text)


def console(*, json: bool = False) -> "Console":
    """Return the console for people: plain text on anything but a terminal, no colour with NO_COLOR.

    With --json, stdout belongs to the document. The console then writes to stderr, and is silent unless that is a
    terminal.
    """
    from rich.console import Console

    quiet = json and not sys.stderr.isatty()
    screen = Console(stderr=json, quiet=quiet, highlight=False)
    # rich breaks lines at 80 columns in files too, where other programs read whole lines.
    screen.soft_wrap = not screen.is_terminal
    return screen


def print_json(document: Any) -> None:
    """Print one JSON document and a newline. Dataclasses become their fields, NaN and infinity null."""
    # Imported here: the list of verbs needs lines alone, and should start at once.
    import json

    from meshwright.interface.answers.answer import plain

    json.dump(plain(document), sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def print_answer(answer: "Answer", lines: Iterable[str], *, json: bool) -> None:
    """Print the document of an answer, or else these lines about it."""
    if json:
        print_json(answer.to_dict())
    else:
        show(lines)


@contextmanager
def explain_wait(line: str) -> Iterator[None]:
    """Print `line` on stderr once the block has taken PATIENCE_S seconds, else people take it for hung."""
    from threading import Timer

    timer = Timer(PATIENCE_S, print, [line], {"file": sys.stderr, "flush": True})
    # A verb that fails early must not wait for its own timer.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
