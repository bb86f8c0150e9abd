"""Lines for a terminal of any width: whole words, colours for verdicts only, signs that the encoding has."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence

NARROWEST, WIDEST = 60, 200
"""Narrowest and widest layout in columns. A narrower terminal breaks lines itself."""
COLOURS = {"green": "32", "yellow": "33", "red": "31"}


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


def bar(share: float, cells: int = 20) -> str:
    """Draw the used share of a whole."""
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
