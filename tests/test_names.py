"""Names that tests, benchmarks, claims and pages take from the package exist. mypy reads none of these files.

The modules are parsed and not imported, so that a name behind a GPU or an optional package is checked too.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"meshwright": ROOT / "src", "tests": ROOT, "benchmarks": ROOT, "evaluation": ROOT, "docs": ROOT}
READERS = ("tests", "benchmarks", "claims", "docs", "evaluation", "examples")
DOTTED = re.compile(r"(?<![\w./-])meshwright(?:\.[A-Za-z_]\w*)+")
IMPORTED = re.compile(r"from (meshwright[\w.]*) import ([\w, ]+)")
ABSENT = ("meshwright.toml", "meshwright.yaml", "meshwright.nothing")
"""Dotted words that are names of files, or stand for a name that does not exist."""


def module_path(dotted: str) -> Path | None:
    """Return the file of a module or of a package's `__init__`, or the folder of a package without one."""
    parts = dotted.split(".")
    base = FOLDERS[parts[0]].joinpath(*parts)
    candidates = (base.with_suffix(".py"), base / "__init__.py", base)
    return next((path for path in candidates if path.exists()), None)


@cache
def bound_names(path: Path) -> frozenset[str] | None:
    """Return what a module binds, wherever in it. None = a folder, which binds its modules only.

    Strings count too: a package names what it loads on first use in a table of strings.
    """
    if path.is_dir():
        return None
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif path.name == "__init__.py" and isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return frozenset(names)


@cache
def exists(dotted: str, name: str) -> bool:
    """Return True if a module binds the name or has a module of this name below it."""
    path = module_path(dotted)
    names = bound_names(path) if path else frozenset[str]()
    return path is not None and (bool(names and name in names) or module_path(f"{dotted}.{name}") is not None)


@cache
def resolves(dotted: str) -> bool:
    """Return True if a dotted name leads to a module, or to a name in one. Attributes below that are not followed."""
    parts = dotted.split(".")
    depth = max((n for n in range(1, len(parts) + 1) if module_path(".".join(parts[:n]))), default=0)
    return depth == len(parts) or (depth > 0 and exists(".".join(parts[:depth]), parts[depth]))


def missing_names(source: str) -> Iterator[str]:
    """Yield names of this repository that a module imports, patches or reads from a module, and that do not exist."""
    nodes = list(ast.walk(ast.parse(source)))
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in FOLDERS and not module_path(alias.name):
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FOLDERS and not node.level:
            for alias in node.names:
                if alias.name != "*" and not exists(str(node.module), alias.name):
                    yield f"{node.module}.{alias.name}"
                elif module_path(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (dotted for dotted in DOTTED.findall(node.value) if not known(dotted))
            # Programs for other processes are written as strings.
            for module, names in IMPORTED.findall(node.value):
                words = (word.partition(" as ")[0].strip() for word in names.split(","))
                yield from (f"{module}.{word}" for word in words if word.isidentifier() and not exists(module, word))
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assigned |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    modules = {name: dotted for name, dotted in modules.items() if name not in assigned}
    for node in nodes:
        pairs = []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
            pairs = [(node.value.id, node.attr)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            match node.args:
                case [ast.Name(id=module), ast.Constant(value=str(name)), *_]:
                    pairs = [(module, name)]
        for module, name in pairs:
            if module in modules and not name.startswith("__") and not exists(modules[module], name):
                yield f"{modules[module]}.{name}"


def known(dotted: str) -> bool:
    """Return True if a dotted word in a text is no name, or one that exists."""
    return dotted.startswith(ABSENT) or resolves(dotted)


@pytest.mark.parametrize("folder", READERS)
def test_names_of_the_package_exist(folder: str) -> None:
    absent = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        if (names := sorted(set(missing_names(path.read_text()))))
    }
    assert not absent


def test_dotted_names_in_pages_exist() -> None:
    files = ("README.md", "CONTRIBUTING.md", "Makefile", "claims/claims.toml")
    pages = [*(ROOT / name for name in files), *ROOT.glob("docs/**/*.md")]
    absent = {
        str(page.relative_to(ROOT)): names
        for page in pages
        if (names := sorted({dotted for dotted in DOTTED.findall(page.read_text()) if not known(dotted)}))
    }
    assert not absent


def test_a_name_that_does_not_exist_is_seen() -> None:
    wrong = {
        "from meshwright.spec.plan.plan import Plan, Plans": ["meshwright.spec.plan.plan.Plans"],
        "from meshwright.spec import plans": ["meshwright.spec.plans"],
        "from meshwright.spec.plan import plan\nplan.Plan\nplan.Plans": ["meshwright.spec.plan.plan.Plans"],
        "from meshwright.spec.plan import plan\nm.setattr(plan, 'CHAT', 1)": ["meshwright.spec.plan.plan.CHAT"],
        "m.setattr('meshwright.spec.plan.plan.Plans', 1)": ["meshwright.spec.plan.plan.Plans"],
        "import meshwright.specs": ["meshwright.specs"],
        "run('from meshwright.spec import units, unit as u')": ["meshwright.spec.unit"],
    }
    assert {source: list(missing_names(source)) for source in wrong} == wrong
    assert not list(missing_names("from meshwright import spec\nimport meshwright as mw\nmw.load"))
