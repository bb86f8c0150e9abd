"""Options in Python: attributes set on a configuration, or keyword arguments that create it. Nothing is executed."""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def write(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return statements `config.a.b = value` for the body of a function, each with its meaning."""
    return "".join(f"    {line}\n" for setting in settings for line in _statement(setting))


def _statement(setting: Setting) -> list[str]:
    value = setting.value.name if isinstance(setting.value, Called) else repr(setting.value)
    statement = f"{ROOT}.{setting.key} = {value}"
    if not setting.meaning:
        return [statement]
    commented = f"{statement}  # {setting.meaning}"
    return [commented] if len(commented) <= WIDTH else [f"# {setting.meaning}", statement]


def read(text: str, function: str = "") -> list[Entry]:
    """Return every option that a function of the file sets. Raises PlanError for invalid Python, or no function."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PlanError(f"line {error.lineno}: no Python ({error.msg})") from None
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    chosen = [node for node in defined if node.name == function] if function else defined
    if not chosen:
        names = ", ".join(node.name for node in defined[:20])
        raise PlanError(f"line 1: no function {function or 'of a configuration'}; there are: {names}")
    if len(chosen) > 1:
        raise PlanError(f"line 1: {len(chosen)} functions: choose one, as FILE.py:{chosen[0].name}")
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    named = [Entry(key="def", value=chosen[0].name, line=chosen[0].lineno)]
    constants = _assignments([node for node in tree.body if isinstance(node, ast.Assign)])
    if isinstance(name := constants.get("NAME"), ast.Constant):
        named.append(Entry(key=NAMED, value=name.value, line=name.lineno))
    functions = {node.name: node for node in defined}
    return [
        *named,
        *(entry for node in imports for entry in _statement_entries(node, {}, {})),
        *_function_entries(chosen[0], functions),
    ]


def _assignments(nodes: Sequence[ast.Assign]) -> dict[str, ast.expr]:
    return {node.targets[0].id: node.value for node in nodes if isinstance(node.targets[0], ast.Name)}


def _function_entries(function: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> Iterator[Entry]:
    """Yield everything that a function sets, after the options of the function that it starts from."""
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
    first = node.args[0] if node.args else None
    return ast.unparse(node.func) + (f"({first.value!r})" if isinstance(first, ast.Constant) else "")


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
