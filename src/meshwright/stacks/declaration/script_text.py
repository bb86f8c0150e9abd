"""Options in Python and in shell scripts. Nothing is executed.

In Python they are attributes set on a configuration, or keyword arguments that create it. In a shell script they are
arguments of a command: `--key value`, `--key=value`, or `--key` alone.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.spec.errors import PlanError
from meshwright.stacks.declaration.option import Called, Entry, Setting

FOLDED: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Pow: operator.pow,
}  # fmt: skip
ROOT = "config"
"""Name of the configuration in a written function."""
NAMED = "named"
"""Key of the name that a module gives itself with its constant NAME."""
WIDTH = 110
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


def write_python(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return statements `config.a.b = value` for the body of a function, each with its meaning."""
    return "".join(f"    {line}\n" for setting in settings for line in _statement(setting))


def _statement(setting: Setting) -> list[str]:
    value = setting.value.name if isinstance(setting.value, Called) else repr(setting.value)
    statement = f"{ROOT}.{setting.key} = {value}"
    if not setting.meaning:
        return [statement]
    commented = f"{statement}  # {setting.meaning}"
    return [commented] if len(commented) <= WIDTH else [f"# {setting.meaning}", statement]


def read_python(text: str, function: str = "") -> list[Entry]:
    """Return every option that a function of the file sets. Raises PlanError for invalid Python, or no function."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PlanError(f"line {error.lineno}: no Python ({error.msg})") from None
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    selected_functions = [node for node in defined if node.name == function] if function else defined
    if not selected_functions:
        names = ", ".join(node.name for node in defined[:20])
        raise PlanError(f"line 1: no function {function or 'of a configuration'}; there are: {names}")
    if len(selected_functions) > 1:
        raise PlanError(
            f"line 1: {len(selected_functions)} functions: choose one, as FILE.py:{selected_functions[0].name}"
        )
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    name_entries = [Entry(key="def", value=selected_functions[0].name, line=selected_functions[0].lineno)]
    constants = _assignments([node for node in tree.body if isinstance(node, ast.Assign)])
    if isinstance(name := constants.get("NAME"), ast.Constant):
        name_entries.append(Entry(key=NAMED, value=name.value, line=name.lineno))
    functions = {node.name: node for node in defined}
    return [
        *name_entries,
        *(entry for node in imports for entry in _statement_entries(node, {}, {})),
        *_function_entries(selected_functions[0], functions),
    ]


def _assignments(nodes: Sequence[ast.Assign]) -> dict[str, ast.expr]:
    return {node.targets[0].id: node.value for node in nodes if isinstance(node.targets[0], ast.Name)}


def _function_entries(function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> Iterator[Entry]:
    """Yield everything that a function sets, after the options of the function that it starts from."""
    # A function is taken out before those that it calls are followed, so calls in a circle end.
    others = {name: node for name, node in functions.items() if name != function.name}
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    local_values = {**_defaults(function), **_assignments(assigned)}
    answers = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    returned = {answer.id for answer in answers if isinstance(answer, ast.Name)}
    for node in ast.walk(function):
        yield from _statement_entries(node, local_values, others)
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.targets[0]) in returned
        ):
            yield from _keywords(node.value, local_values, others)


def _statement_entries(
    node: ast.AST, local_values: Mapping[str, ast.expr], functions: Mapping[str, ast.FunctionDef]
) -> Iterator[Entry]:
    """Yield the options of a statement, with local names and functions of the same file resolved."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        names = ast.unparse(node.targets[0]).split(".")
        yield from _option_entries(".".join(names[1:]), node.value, local_values)
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
        if (name := ast.unparse(node.value.func)) in functions:
            yield from _function_entries(functions[name], functions)
        else:
            yield Entry(key="=", value=Called(name=_call_name(node.value)), line=node.lineno)
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
        yield from _keywords(node.value, local_values, functions)
    elif isinstance(node, ast.ImportFrom):
        yield Entry(
            key="import", value=f"{node.module}:{','.join(alias.name for alias in node.names)}", line=node.lineno
        )


def _keywords(
    node: ast.Call, local_values: Mapping[str, ast.expr], functions: Mapping[str, ast.FunctionDef]
) -> Iterator[Entry]:
    """Yield arguments of the call that creates a configuration, after the defaults of functions that they call."""
    for keyword in node.keywords:
        maker = functions.get(ast.unparse(keyword.value.func)) if isinstance(keyword.value, ast.Call) else None
        if maker is not None:
            for name, default in _defaults(maker).items():
                yield from _option_entries(f"{keyword.arg}.{name}", default, {})
        yield from _option_entries(keyword.arg or "", keyword.value, local_values)


def _defaults(function: ast.FunctionDef) -> Mapping[str, ast.expr]:
    """Return the defaults of a function's arguments."""
    names = [argument.arg for argument in function.args.args]
    values = function.args.defaults
    return dict(zip(names[len(names) - len(values) :], values, strict=True))


def _call_name(node: ast.Call) -> str:
    """Return the name of a called function, with its first argument if that is a literal: model_registry('8B')."""
    first_argument = node.args[0] if node.args else None
    return ast.unparse(node.func) + (f"({first_argument.value!r})" if isinstance(first_argument, ast.Constant) else "")


def _option_entries(key: str, node: ast.expr, local_values: Mapping[str, ast.expr]) -> Iterator[Entry]:
    """Yield the value of an option: each keyword of a call below its name, a local name as its assigned value."""
    if isinstance(node, ast.Name) and isinstance(local_values.get(node.id), ast.Call | ast.Constant):
        node = local_values[node.id]
    if isinstance(node, ast.Call):
        yield Entry(key=key, value=Called(name=_call_name(node)), line=node.lineno)
        for keyword in node.keywords:
            if keyword.arg:
                # Inside a call only constants are looked up, so a name that is bound to itself cannot recurse.
                plain = {
                    name: expression
                    for name, expression in local_values.items()
                    if isinstance(expression, ast.Constant)
                }
                yield from _option_entries(f"{key}.{keyword.arg}", keyword.value, plain)
        return
    yield Entry(key=key, value=evaluate_literals(node), line=node.lineno)


def evaluate_literals(node: ast.expr) -> Any:
    """Return the value of literals and of arithmetic on them, or else the source."""
    if isinstance(node, ast.BinOp) and type(node.op) in FOLDED:
        left, right = evaluate_literals(node.left), evaluate_literals(node.right)
        # Bounds keep a hostile file from computing for hours.
        if isinstance(left, int | float) and isinstance(right, int | float) and abs(right) < 1e9:
            return FOLDED[type(node.op)](left, right) if not isinstance(node.op, ast.Pow) or right < 64 else None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Called(name=ast.unparse(node))


def write_shell(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return a bash array with an option and its meaning per line. A switch has no value."""
    lines = [f"# {line}".rstrip() for line in title]
    lines.append(f"{ARRAY}=(")
    for setting in settings:
        # A switch has no word for off: it is left out.
        if setting.value is False:
            continue
        line = f"    {setting.key}" + ("" if setting.value is True else f" {shlex.quote(_word(setting.value))}")
        lines.append(f"{line}  # {setting.meaning}" if setting.meaning else line)
    return "\n".join([*lines, ")"]) + "\n"


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_shell(text: str) -> list[Entry]:
    """Return every `--option` of the commands and arrays of a script, with variables that it sets filled in."""
    names: dict[str, str] = {}
    words: list[tuple[str, int]] = []
    for number, line in _lines(text):
        # Line by line: a later assignment must not change the commands above it.
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
    # Bash divides whole numbers and drops the remainder. So does //, for numbers of 0 or more.
    expression = re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), text).replace("/", "//")
    try:
        number = evaluate_literals(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return ""
    return str(number) if isinstance(number, int) else ""


def _words(line: str, number: int) -> Iterator[str]:
    """Yield the words of a line, and of a command that it holds as a string."""
    for word in _split(line, number):
        # A whole command in quotes, as after `bash -c`: its options count too.
        if re.search(r"\s--[A-Za-z]|^--[\w-]+\s", word) and not re.match(ASSIGNMENT, word):
            yield from _words(word, number)
        else:
            yield word


def _split(line: str, number: int) -> list[str]:
    # Parentheses of arrays and subshells would stick to the words next to them.
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
        # A program is a file of Python, or a dotted module behind -m.
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
    # int comes first, since float would accept whole numbers too.
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(word.lower(), word)
