"""What `make test-fast` takes: the first tests of each module that are not slow, and of every folder something."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import fast

TESTS = Path(__file__).resolve().parent


def test_the_first_tests_of_each_module_and_none_that_is_slow() -> None:
    class Item(SimpleNamespace):
        __hash__ = object.__hash__

    items: Any = [
        Item(nodeid=name, get_closest_marker=lambda mark, marks=marks: mark if mark in marks else None)
        for name, *marks in (
            *(("a.py::h", "slow"), ("a.py::f[1]",), ("a.py::f[2]",), ("a.py::g",), ("a.py::k",)),
            *(("b.py::f[3]",), ("c.py::C::f", "slow")),
        )
    ]
    assert sorted(one.nodeid for one in fast(items)) == ["a.py::f[1]", "a.py::g", "b.py::f[3]"]


def test_every_folder_has_tests_that_are_not_slow() -> None:
    for folder in (path for path in TESTS.iterdir() if any(path.glob("test_*.py"))):
        functions = (
            one
            for path in folder.glob("test_*.py")
            for one in ast.walk(ast.parse(path.read_text()))
            if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")
        )
        marks = [{ast.unparse(mark) for mark in one.decorator_list} for one in functions]
        quick = [one for one in marks if "pytest.mark.slow" not in one]
        assert quick, folder.name
