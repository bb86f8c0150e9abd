"""Code reads like plain English: names say what a thing is, docstrings begin with a verb or a noun of the field.

These rules hold in every package. Names outside the package are held to the rule of pronouns.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.packages import BELOW

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "meshwright"
PRONOUNS = frozenset({"found", "one", "own", "some", "said", "kept", "given", "of", "place"})
"""Names that point at a thing without naming it."""
PUBLIC = frozenset({("verbs/plan_from/answer.py", "given")})
"""Names that users of the Python interface call (docs/python.md), so they stay."""
VAGUE = frozenset({"result", "value", "item", "res", "tmp", "obj"})
"""Names that say as little. A function of at most VAGUE_LINES lines may use them."""
VAGUE_LINES = 8
OPENINGS = re.compile(r"(Of|What|As|Whether|Where|When|By|For|To|From|How|Who|Which|That|If|Also|Here|With|Without)\b")
"""First words of docstrings that are neither a verb nor a noun of the field."""
MOST_WORDS = 30
"""Longest sentence of a docstring, in words."""

SCRIPT_NOISE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'", re.DOTALL)
"""Comments and plain strings of JavaScript. Template literals stay, because they contain code."""
SCRIPT_BINDINGS = (
    re.compile(r"\b(?:const|let|var)\s+(\w+|[\[{][^=]*?[\]}])\s*(?==|;|,|of\b|in\b)"),  # also those of a for loop
    re.compile(r",\s*(\w+|\{[^{}=()]*\}|\[[^\[\]=()]*\])\s*=(?![=>])"),  # further declarations, and defaults
    re.compile(r",\s*(\w+)\s*;"),
    re.compile(r"\b(?:function\b\s*\*?|class\b)\s*(\w+)"),
    re.compile(r"\bfunction\b\s*\*?\s*\w*\s*\(([^()]*)\)"),
    re.compile(r"(?m)^\s*(?!(?:if|for|while|switch|catch)\b)\w+\(([^()]*)\)\s*\{"),  # a method
    re.compile(r"\bcatch\s*\((\w+)\)"),
    re.compile(r"\(([^()]*)\)\s*=>"),
    re.compile(r"([A-Za-z_$][\w$]*)\s*=>"),
)
"""Where a script binds names. A group may hold a list of parameters or a destructuring pattern."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules(package: str) -> list[tuple[Path, ast.Module]]:
    """List the modules of a package with their syntax trees."""
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted((SOURCE / package).rglob("*.py"))]


def assigned_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every variable, parameter, attribute, function and class that the code defines."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.ExceptHandler(name=str(name)):
                yield node.lineno, name


def script_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every variable, parameter, function and class that a script defines.

    In `{key: name = default}` only `name` is bound: the key is somebody else's word.
    """
    text = SCRIPT_NOISE.sub(lambda noise: re.sub(r"[^\n]", " ", noise.group()), text)
    for pattern in SCRIPT_BINDINGS:
        for binding in pattern.finditer(text):
            bound = re.sub(r"=[^,\]}]*", "", re.sub(r"[\w$]+\s*:", "", binding.group(1)))
            for name in re.findall(r"[A-Za-z_$][\w$]*", bound):
                yield text.count("\n", 0, binding.start(1)) + 1, name


def vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of vague names in functions of more than VAGUE_LINES lines.

    The variable of a comprehension or a lambda lives for one expression, so it may be vague.
    """
    for node in ast.walk(tree):
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= VAGUE_LINES:
            brief = {
                hit
                for inner in ast.walk(node)
                if isinstance(inner, ast.comprehension | ast.Lambda)
                for hit in assigned_names(inner.target if isinstance(inner, ast.comprehension) else inner.args)
            }
            yield from (hit for hit in assigned_names(node) if hit[1].strip("_") in VAGUE and hit not in brief)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the docstrings of modules, classes, functions, and the attributes and constants below."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def long_sentences(text: str) -> list[str]:
    """List the sentences of a docstring with more than MOST_WORDS words. A shape is one word; drawings are skipped."""
    text = re.sub(r"\([A-Z][^()]*\)", "SHAPE", text)
    paragraphs = [
        part for part in re.split(r"\n\s*\n", text) if not re.search(r"^\s{8,}|\S   +\S|^\s*[-*|]", part, re.MULTILINE)
    ]
    sentences = [sentence for part in paragraphs for sentence in re.split(r"(?<=[.:;?!])\s+", " ".join(part.split()))]
    return [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS]


def violations(package: str, rule: str) -> list[str]:
    """List what breaks a rule in a package, as path:line: text."""
    lines = []
    for path, tree in modules(package):
        match rule:
            case "pronouns":
                hits = [
                    (line, name)
                    for line, name in assigned_names(tree)
                    if name.strip("_") in PRONOUNS and (path.relative_to(SOURCE).as_posix(), name) not in PUBLIC
                ]
            case "vague":
                hits = list(vague_names(tree))
            case "openings":
                hits = [(line, text[:60]) for line, text in docstrings(tree) if OPENINGS.match(text)]
            case _:
                hits = [(line, long) for line, text in docstrings(tree) for long in long_sentences(text)]
        lines += [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in hits]
    return lines


@pytest.mark.parametrize("rule", ["pronouns", "vague", "openings", "sentences"])
@pytest.mark.parametrize("package", BELOW)
def test_a_revised_package_keeps_its_words(package: str, rule: str) -> None:
    assert not violations(package, rule)


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "claims", "docs", "evaluation", "examples"])
def test_names_outside_the_package_are_no_pronouns(folder: str) -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / folder).rglob("*.py"))}
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in assigned_names(tree)
        if name.strip("_") in PRONOUNS
    ]


def test_names_in_scripts_say_what_a_thing_is() -> None:
    scripts = sorted(SOURCE.rglob("*.js"))
    assert scripts
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in scripts
        for line, name in script_names(path.read_text(encoding="utf-8"))
        if name.strip("_$") in PRONOUNS | VAGUE
    ]


def test_every_way_to_bind_a_name_in_a_script_is_read() -> None:
    script = """
        const one = 1, {kept: said, total} = one, [, found] = costs; // const comment = 1
        let place = "const text = 1", given;
        for (const own of rows) for (const [tmp, {res}] of own) use(tmp, res);
        function* some(of, {value = 3, key: item}, [first] = []) { return `${list.map((obj) => obj.kept)}`; }
        const panel = {
          show(result, target) { if (target.kept) call(target.kept); },
        };
        rows.map(cost => cost.given).filter(([row, {data: {name}}], n) => row && name && n);
        try { run(); } catch (problem) { report(problem.own, problem.one === problem.some); }
    """
    assert {name for _, name in script_names(script)} == {
        "one", "said", "total", "found", "place", "given", "own", "tmp", "res", "some", "of", "value", "item", "first",
        "obj", "panel", "result", "target", "cost", "row", "name", "n", "problem",
    }  # fmt: skip
    assert (3, "place") in set(script_names(script))
