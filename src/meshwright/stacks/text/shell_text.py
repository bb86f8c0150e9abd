"""Options as arguments of a command in a shell script: `--key value`, `--key=value`, or `--key` alone."""

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.spec.errors import PlanError
from meshwright.stacks.text.option_text import Entry, Setting
from meshwright.stacks.text.python_text import folded

ARRAY = "ARGUMENTS"
"""The bash array that is written."""
VARIABLE = re.compile(r"\$\{?(\w+)(?::?[-=]([^}]*))?\}?")
ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
QUOTED = r"\"(?:\\.|[^\"\\])*\"|'[^']*'"
BREAK = re.compile(rf"\\[^\n]|{QUOTED}|(?<!\S)#[^\n]*|\n", re.DOTALL)
"""Ends of lines, beside what they are not to be looked for in: strings, comments, escaped characters."""
ASSIGNED = re.compile(
    rf"(?:^|[\s;])([A-Za-z_]\w*)(\+?)=(?![(])({QUOTED}|{ARITHMETIC.pattern}|(?:\$\{{[^}}\n]*\}}|[^\s;#])*)", re.DOTALL
)
PROGRAMS = ("trl", "swift")
"""Trainers whose verb says what is trained."""
SCRIPT = "script"
"""Key of the program that a command runs, where it is one of Python, or a trainer and its verb."""
LONGEST = 100_000
"""Characters of a line: a variable may hold others, and they others."""
ASSIGNMENT = r"[A-Za-z_]\w*\+?="
BRANCH = re.compile(r"^\s*-{1,2}\w[\w-]*(?:\s*\|\s*-{1,2}\w[\w-]*)*\s*\)")
"""Begins a branch of `case`: the script reads an option of its own there, and passes none on."""


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
        for name, more, value, _ in ASSIGNED.findall(line):
            known = _known(value.strip("\"'"), names)
            names[name] = names.get(name, "") + known if more else known
        words += [(word, number) for word in _words(BRANCH.sub("", _known(line, names)), number)]
    lines = text.splitlines()
    entries = list(_entries(words)) or list(_entries(_left_to_others(names)))
    return [replace(one, line=_line_of(one, lines)) for one in entries]


def _left_to_others(names: dict[str, str]) -> list[tuple[str, int]]:
    """Options in variables of a script without a command that has any: one that sources it passes them on."""
    held = (value for value in names.values() if re.match(r"\s*--[A-Za-z]", value))
    return [(word, 1) for value in held for word in _words(value.replace("\\\n", " "), 1)]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """A line that ends in a backslash goes on; its arguments keep the number of their own line all the same. A string
    over several lines is in one. Comments are left out."""
    number, line, at, breaks = 1, "", 0, 0
    for found in BREAK.finditer(f"{text}\n"):
        line += text[at : found.start()]
        at, breaks = found.end(), breaks + found[0].count("\n")
        if found[0] == "\n":
            yield number, line.rstrip().removesuffix("\\")
            number, line = breaks + 1, ""
        elif not found[0].startswith("#"):
            line += found[0].replace("\\\n", " ")


def _line_of(one: Entry, lines: Sequence[str]) -> int:
    """Of an option that a variable brought, the line where it was last written."""
    if one.key == SCRIPT or one.key in lines[one.line - 1]:
        return one.line
    return max((number for number, line in enumerate(lines, 1) if one.key in line), default=one.line)


def _known(text: str, names: dict[str, str]) -> str:
    found = VARIABLE.sub(lambda found: _held(found, names), text)
    if len(found) > LONGEST:
        raise PlanError(f"a line of more than {LONGEST:,} characters, once its variables are known: no options")
    return ARITHMETIC.sub(lambda found: _computed(found[1], names) or found[0], found)


def _held(found: re.Match[str], names: dict[str, str]) -> str:
    """Of a variable, what the script sets; its own default where it sets nothing, or what comes from outside."""
    name, default = found.groups()
    held = names.get(name)
    if held is None or (default and held.startswith("$")):
        return (default or found[0]).strip("\"'")
    return held


def _computed(text: str, names: dict[str, str]) -> str:
    """The whole number of an arithmetic expression; empty where it is none."""
    said = re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found[0], found[0]), text).replace("/", "//")
    try:
        value = folded(ast.parse(said.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return ""
    return str(value) if isinstance(value, int) else ""


def _words(line: str, number: int) -> Iterator[str]:
    """Of a line, and of a command that stands in it as a string."""
    for word in _split(line, number):
        if re.search(r"\s--[A-Za-z]|^--[\w-]+\s", word) and not re.match(ASSIGNMENT, word):
            yield from _words(word, number)
        else:
            yield word


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
        if re.fullmatch(r"[\w./${}-]+\.py", word) or (at and words[at - 1][0] == "-m" and "." in word):
            yield Entry(key=SCRIPT, value=word.rpartition("/")[2], line=number)
        elif word in PROGRAMS and at + 1 < len(words):
            yield Entry(key=SCRIPT, value=f"{word} {words[at + 1][0]}", line=number)
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
    return bool(re.match(ASSIGNMENT + r"|\"?\$\{?\w+\[|&&|\|\||[;|&]$", word))


def number_of(word: str) -> object:
    """The number that a word is, or True or False, or the word."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(word.lower(), word)
