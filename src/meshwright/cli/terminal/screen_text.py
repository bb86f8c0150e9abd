"""Lines for a terminal of any width: whole words, colour for verdicts alone, marks that the encoding has."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence

NARROWEST, WIDEST = 60, 200
"""Columns between which lines are laid out; a narrower terminal breaks them itself."""
COLOURS = {"green": "32", "yellow": "33", "red": "31"}


def width() -> int:
    """Columns of the terminal; of a file or pipe COLUMNS, else 80."""
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size((80, 24)).columns))


def coloured(text: str, colour: str) -> str:
    """A verdict in its colour; plain where NO_COLOR is set, or stdout is no terminal that knows colours."""
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if plain else f"\x1b[1;{COLOURS[colour]}m{text}\x1b[0m"


def marked(lines: Iterable[str], word: str, colour: str) -> Iterator[str]:
    """Lines of which the first has a word in its colour."""
    first, *rest = lines
    yield first.replace(word, coloured(word, colour), 1)
    yield from rest


def wrapped(text: str | Sequence[str], columns: int, first: str = "", rest: str | None = None) -> Iterator[str]:
    """Lines of at most so many columns, broken between words alone: one word that is longer keeps its line to itself.
    `first` leads the first line, `rest` (blanks of its length by default) the others. A sequence: its items are not
    broken, and three blanks apart."""
    words, between = (text.split(), " ") if isinstance(text, str) else (text, "   ")
    lead, rest = first, " " * len(first) if rest is None else rest
    line, used = lead, False
    for word in words:
        if used and len(line) + len(between) + len(word) > columns:
            yield line
            line, used = rest, False
        line += (between if used else "") + word
        used = True
    yield line.rstrip()


def continued(command: str, columns: int, lead: str) -> Iterator[str]:
    """A shell's command over as many lines as it takes, to be pasted as they stand: each but the last ends in a
    backslash, and an option keeps its value on its line."""
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
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
    """Lines as they are; one that is longer than the terminal goes on below, two columns to the right. In files and
    pipes none is broken, unless COLUMNS says how wide they are."""
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    for line in lines:
        lead = line[: len(line) - len(line.lstrip())]
        if fixed and len(line) > width():
            yield from wrapped(line, width(), lead, lead + "  ")
        else:
            yield line


def bar(share: float, cells: int = 20) -> str:
    """How much of a whole is used, as a bar."""
    full, empty = ("\u2588", "\u2591") if _unicode() else ("#", ".")
    used = min(cells, max(0, round(share * cells)))
    return full * used + empty * (cells - used)


def dot() -> str:
    """What stands between the parts of a headline."""
    return " \u00b7 " if _unicode() else ", "


def show(lines: Iterable[str]) -> None:
    """Print them."""
    for line in lines:
        print(line)


def _unicode() -> bool:
    return (sys.stdout.encoding or "").lower().startswith("utf")


def plus_minus(text: str) -> str:
    """The sign as the encoding has it."""
    return text if _unicode() else text.replace("\u00b1", "+-")
