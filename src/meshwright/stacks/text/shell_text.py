"""Options as arguments of a command in a shell script: `--key value`, `--key=value`, or `--key` alone."""

import re
import shlex
from collections.abc import Iterator, Sequence

from meshwright.spec.errors import PlanError
from meshwright.stacks.text.option_text import Entry, Setting

ARRAY = "ARGUMENTS"
"""The bash array that is written."""
VARIABLE = re.compile(r"\$\{?(\w+)(?::?[-=]([^}]*))?\}?")
ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=(?![(])(\"[^\"]*\"|'[^']*'|[^\s;#]*)\s*(?:#.*)?$")


def write(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """A bash array with an option per line and its meaning beside it; a switch stands alone."""
    lines = [f"# {line}".rstrip() for line in title]
    lines.append(f"{ARRAY}=(")
    for one in settings:
        if one.value is False:
            continue
        said = f"    {one.key}" if one.value is True else f"    {one.key} {shlex.quote(_word(one.value))}"
        lines.append(f"{said}  # {one.meaning}" if one.meaning else said)
    return "\n".join([*lines, ")"]) + "\n"


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def read(text: str) -> list[Entry]:
    """Every `--option` of the script's commands and arrays; variables are followed where the script sets them."""
    names: dict[str, str] = {}
    words: list[tuple[str, int]] = []
    for number, line in _lines(text):
        assigned = ASSIGNED.match(line)
        if assigned:
            names[assigned[1]] = _known(assigned[2].strip("\"'"), names)
        if not assigned or "--" in assigned[2]:
            words += [(word, number) for word in _split(_known(line, names), number)]
    return list(_entries(words))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """A line that ends in a backslash goes on; its arguments keep the number of their own line all the same."""
    for number, line in enumerate(text.splitlines(), 1):
        yield number, line.rstrip().removesuffix("\\")


def _known(text: str, names: dict[str, str]) -> str:
    return VARIABLE.sub(lambda found: names.get(found[1], found[2] or found[0]), text)


def _split(line: str, number: int) -> list[str]:
    lexer = shlex.shlex(line.replace("(", " ").replace(")", " "), posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        return list(lexer)
    except ValueError:
        if "--" not in line:
            return []  # quotes that go over several lines, around something else
        raise PlanError(f"line {number}: a quote is not closed") from None


def _entries(words: Sequence[tuple[str, int]]) -> Iterator[Entry]:
    for at, (word, number) in enumerate(words):
        if not re.match(r"--[A-Za-z]", word):
            continue
        key, equals, value = word.partition("=")
        after = words[at + 1] if at + 1 < len(words) else ("--", 0)
        if equals:
            yield Entry(key=key, value=number_of(value), line=number)
        elif after[0].startswith("--") or after[1] > number + 1 or _starts_command(after[0]):
            yield Entry(key=key, value=True, line=number)
        else:
            yield Entry(key=key, value=number_of(after[0]), line=number)


def _starts_command(word: str) -> bool:
    """Whether a word is no value: a path of a script, an array, the name of a variable that gets one."""
    return bool(re.match(r"[A-Za-z_]\w*\+?=|\"?\$\{?\w+\[|&&|\|\||[;|&]$", word))


def number_of(word: str) -> object:
    """The number that a word is, or True or False, or the word."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(word.lower(), word)
