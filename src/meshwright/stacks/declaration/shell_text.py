"""Options as arguments of a command in a shell script: `--key value`, `--key=value`, or `--key` alone."""

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.spec.errors import PlanError
from meshwright.stacks.declaration.option import Entry, Setting
from meshwright.stacks.declaration.python_text import evaluate_literals

ARRAY = "ARGUMENTS"
"""Name of the bash array that is written."""
VARIABLE = re.compile(r"\$\{?(\w+)(?::?[-=]([^}]*))?\}?")
ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
QUOTED = r"\"(?:\\.|[^\"\\])*\"|'[^']*'"
BREAK = re.compile(rf"\\[^\n]|{QUOTED}|(?<!\S)#[^\n]*|\n", re.DOTALL)
"""Ends of lines, and what may hide them: strings, comments, escaped characters."""
ASSIGNED = re.compile(
    rf"(?:^|[\s;])([A-Za-z_]\w*)(\+?)=(?![(])({QUOTED}|{ARITHMETIC.pattern}|(?:\$\{{[^}}\n]*\}}|[^\s;#])*)", re.DOTALL
)
PROGRAMS = ("trl", "swift")
"""Trainers whose verb names the kind of training."""
SCRIPT = "script"
"""Key of the program that a command runs: a Python file, or a trainer with its verb."""
LONGEST = 100_000
"""Limit of characters in a line, since variables may expand to others without end."""
ASSIGNMENT = r"[A-Za-z_]\w*\+?="
BRANCH = re.compile(r"^\s*-{1,2}\w[\w-]*(?:\s*\|\s*-{1,2}\w[\w-]*)*\s*\)")
"""Start of a branch of `case`, where the script reads an option and passes none on."""


def write(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return a bash array with an option and its meaning per line. A switch has no value."""
    lines = [f"# {line}".rstrip() for line in title]
    lines.append(f"{ARRAY}=(")
    for setting in settings:
        if setting.value is False:
            continue
        line = f"    {setting.key}" + ("" if setting.value is True else f" {shlex.quote(_word(setting.value))}")
        lines.append(f"{line}  # {setting.meaning}" if setting.meaning else line)
    return "\n".join([*lines, ")"]) + "\n"


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def read(text: str) -> list[Entry]:
    """Return every `--option` of the commands and arrays of a script, with variables that it sets filled in."""
    names: dict[str, str] = {}
    words: list[tuple[str, int]] = []
    for number, line in _lines(text):
        for name, more, assigned, _ in ASSIGNED.findall(line):
            expanded = _expand(assigned.strip("\"'"), names)
            names[name] = names.get(name, "") + expanded if more else expanded
        words += [(word, number) for word in _words(BRANCH.sub("", _expand(line, names)), number)]
    lines = text.splitlines()
    entries = list(_entries(words))
    if not entries:
        # A script without commands sets options in variables, which the script that sources it passes on.
        held = (word.replace("\\\n", " ") for word in names.values() if re.match(r"\s*--[A-Za-z]", word))
        entries = list(_entries([(word, 1) for text_held in held for word in _words(text_held, 1)]))
    return [replace(entry, line=_line_of(entry, lines)) for entry in entries]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of a script without comments.

    A line that ends in a backslash is joined to the next. A string over several lines is a single line.
    """
    number, line, at, breaks = 1, "", 0, 0
    for match in BREAK.finditer(f"{text}\n"):
        line += text[at : match.start()]
        at, breaks = match.end(), breaks + match[0].count("\n")
        if match[0] == "\n":
            yield number, line.rstrip().removesuffix("\\")
            number, line = breaks + 1, ""
        elif not match[0].startswith("#"):
            line += match[0].replace("\\\n", " ")


def _line_of(entry: Entry, lines: Sequence[str]) -> int:
    """Return the line where an option from a variable was last written."""
    if entry.key == SCRIPT or entry.key in lines[entry.line - 1]:
        return entry.line
    return max((number for number, line in enumerate(lines, 1) if entry.key in line), default=entry.line)


def _expand(text: str, names: dict[str, str]) -> str:
    """Replace variables that the script sets, and arithmetic on them, by their values."""
    expanded = VARIABLE.sub(lambda match: _held(match, names), text)
    # Variables that hold others double a line each time: a short hostile script would fill the memory.
    if len(expanded) > LONGEST:
        raise PlanError(f"a line of more than {LONGEST:,} characters, once its variables are known: no options")
    return ARITHMETIC.sub(lambda match: _compute(match[1], names) or match[0], expanded)


def _held(match: re.Match[str], names: dict[str, str]) -> str:
    """Return the value of a variable: set by the script, or else its default, or else the variable itself."""
    name, default = match.groups()
    held = names.get(name)
    # A value that begins with $ comes from outside the script, so its default is the better answer.
    if held is None or (default and held.startswith("$")):
        return (default or match[0]).strip("\"'")
    return held


def _compute(text: str, names: dict[str, str]) -> str:
    """Return the whole number of an arithmetic expression, or an empty string."""
    expression = re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), text).replace("/", "//")
    try:
        value = evaluate_literals(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return ""
    return str(value) if isinstance(value, int) else ""


def _words(line: str, number: int) -> Iterator[str]:
    """Yield the words of a line, and of a command that it holds as a string."""
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
        key, equals, argument = word.partition("=")
        after = words[at + 1] if at + 1 < len(words) else ("--", 0)
        if equals:
            yield Entry(key=key, value=number_of(argument), line=number)
        # A value stands on the line of its option or on the next; what follows later begins something else.
        elif after[0].startswith("--") or after[1] > number + 1 or _starts_command(after[0]):
            yield Entry(key=key, value=True, line=number)
        else:
            yield Entry(key=key, value=number_of(after[0]), line=number)


def _starts_command(word: str) -> bool:
    """Return True if a word cannot be a value: an assignment, an array, or the start of another command."""
    return bool(re.match(ASSIGNMENT + r"|\"?\$\{?\w+\[|&&|\|\||[;|&]$", word))


def number_of(word: str) -> object:
    """Return the number, True or False that a word means, or the word."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(word.lower(), word)
