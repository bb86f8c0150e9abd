"""Options in Python: attributes that are set on a configuration, or keyword arguments that make it. Nothing is run."""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.spec.errors import PlanError
from meshwright.stacks.text.option_text import Called, Entry, Setting

FOLDED: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Pow: operator.pow,
}  # fmt: skip
ROOT = "config"
"""What a written function calls the configuration."""
WIDTH = 110


def write(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Statements `config.a.b = value` to stand in a function, each with its meaning."""
    return "".join(f"    {line}\n" for one in settings for line in _statement(one))


def _statement(one: Setting) -> list[str]:
    value = one.value.name if isinstance(one.value, Called) else repr(one.value)
    said = f"{ROOT}.{one.key} = {value}"
    if not one.meaning:
        return [said]
    beside = f"{said}  # {one.meaning}"
    return [beside] if len(beside) <= WIDTH else [f"# {one.meaning}", said]


def read(text: str, function: str = "") -> list[Entry]:
    """Every option that a file, or one of its functions, sets; PlanError where this is no Python, or there is none."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PlanError(f"line {error.lineno}: no Python ({error.msg})") from None
    made = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    chosen = [node for node in made if node.name == function] if function else made
    if not chosen:
        known = ", ".join(node.name for node in made[:20])
        raise PlanError(f"line 1: no function {function or 'of a configuration'}; there are: {known}")
    if len(chosen) > 1:
        raise PlanError(f"line 1: {len(chosen)} functions: say which, as FILE.py:{chosen[0].name}")
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    named = [Entry(key="def", value=chosen[0].name, line=chosen[0].lineno)]
    inside = (node for one in ast.walk(chosen[0]) for node in _of(one))
    return [*named, *(entry for node in imports for entry in _of(node)), *inside]


def _of(node: ast.AST) -> Iterator[Entry]:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        names = ast.unparse(node.targets[0]).split(".")
        yield from _value(".".join(names[1:]), node.value)
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
        yield Entry(key="=", value=Called(name=ast.unparse(node.value.func)), line=node.lineno)
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
        for keyword in node.value.keywords:
            yield from _value(keyword.arg or "", keyword.value)
    elif isinstance(node, ast.ImportFrom):
        yield Entry(key="import", value=f"{node.module}:{','.join(one.name for one in node.names)}", line=node.lineno)


def _value(key: str, node: ast.expr) -> Iterator[Entry]:
    """Of a call each keyword by itself, below the call's name."""
    if isinstance(node, ast.Call):
        first = [node.args[0]] if node.args and isinstance(node.args[0], ast.Constant) else []
        name = ast.unparse(node.func) + (
            f"({first[0].value!r})" if first and isinstance(first[0], ast.Constant) else ""
        )
        yield Entry(key=key, value=Called(name=name), line=node.lineno)
        for keyword in node.keywords:
            if keyword.arg:
                yield from _value(f"{key}.{keyword.arg}", keyword.value)
        return
    yield Entry(key=key, value=folded(node), line=node.lineno)


def folded(node: ast.expr) -> Any:
    """The value of literals and of arithmetic on them; else the source."""
    if isinstance(node, ast.BinOp) and type(node.op) in FOLDED:
        one, other = folded(node.left), folded(node.right)
        if isinstance(one, int | float) and isinstance(other, int | float) and abs(other) < 1e9:
            return FOLDED[type(node.op)](one, other) if not isinstance(node.op, ast.Pow) or other < 64 else None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Called(name=ast.unparse(node))
