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
NAMED = "named"
"""Key of what a module calls itself, by its constant NAME."""
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
    constants = {one.targets[0].id: one.value for one in tree.body
                 if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)}  # fmt: skip
    if isinstance(name := constants.get("NAME"), ast.Constant):
        named.append(Entry(key=NAMED, value=name.value, line=name.lineno))
    functions = {node.name: node for node in made}
    return [*named, *(entry for node in imports for entry in _of(node, {}, {})), *_inside(chosen[0], functions)]


def _inside(function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> Iterator[Entry]:
    """All that a function sets, after what another function of the file does that it starts from."""
    others = {name: node for name, node in functions.items() if name != function.name}
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    known = {**_defaults(function),
             **{one.targets[0].id: one.value for one in assigned if isinstance(one.targets[0], ast.Name)}}  # fmt: skip
    answers = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    returned = {one.id for one in answers if isinstance(one, ast.Name)}
    for node in ast.walk(function):
        yield from _of(node, known, others)
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.targets[0]) in returned
        ):
            yield from _keywords(node.value, known, others)


def _of(node: ast.AST, known: Mapping[str, ast.expr], functions: Mapping[str, ast.FunctionDef]) -> Iterator[Entry]:
    """`known`: local names with what they were set to. `functions`: of the same file."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        names = ast.unparse(node.targets[0]).split(".")
        yield from _value(".".join(names[1:]), node.value, known)
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
        if (name := ast.unparse(node.value.func)) in functions:
            yield from _inside(functions[name], functions)
        else:
            yield Entry(key="=", value=Called(name=_called(node.value)), line=node.lineno)
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
        yield from _keywords(node.value, known, functions)
    elif isinstance(node, ast.ImportFrom):
        yield Entry(key="import", value=f"{node.module}:{','.join(one.name for one in node.names)}", line=node.lineno)


def _keywords(
    node: ast.Call, known: Mapping[str, ast.expr], functions: Mapping[str, ast.FunctionDef]
) -> Iterator[Entry]:
    """Arguments of the call that makes a configuration; where one calls a function of the file, its defaults first."""
    for keyword in node.keywords:
        made = functions.get(ast.unparse(keyword.value.func)) if isinstance(keyword.value, ast.Call) else None
        if made is not None:
            for name, default in _defaults(made).items():
                yield from _value(f"{keyword.arg}.{name}", default, {})
        yield from _value(keyword.arg or "", keyword.value, known)


def _defaults(function: ast.FunctionDef) -> Mapping[str, ast.expr]:
    """What a function's arguments are where nobody gives others."""
    names = [one.arg for one in function.args.args]
    values = function.args.defaults
    return dict(zip(names[len(names) - len(values) :], values, strict=True))


def _called(node: ast.Call) -> str:
    """The name of what is called, with its first argument where that is a literal: model_registry('8B')."""
    first = node.args[0] if node.args else None
    return ast.unparse(node.func) + (f"({first.value!r})" if isinstance(first, ast.Constant) else "")


def _value(key: str, node: ast.expr, known: Mapping[str, ast.expr]) -> Iterator[Entry]:
    """Of a call each keyword by itself, below the call's name; of a local name what it was set to."""
    if isinstance(node, ast.Name) and isinstance(known.get(node.id), ast.Call | ast.Constant):
        node = known[node.id]
    if isinstance(node, ast.Call):
        yield Entry(key=key, value=Called(name=_called(node)), line=node.lineno)
        for keyword in node.keywords:
            if keyword.arg:
                plain = {name: one for name, one in known.items() if isinstance(one, ast.Constant)}
                yield from _value(f"{key}.{keyword.arg}", keyword.value, plain)
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
