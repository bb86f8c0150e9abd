"""What `make test-fast` takes: the first test of each module that is not slow, and of every folder something."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import fast, part

TESTS = Path(__file__).resolve().parent


def test_the_first_test_of_each_module_and_none_that_is_slow() -> None:
    inputs = [("a.py::h", "slow"), ("a.py::i", "long"), ("a.py::f[1]",), ("a.py::f[2]",), ("a.py::g",), ("a.py::k",)]
    actual = fast(items(*inputs, ("b.py::f[3]",), ("c.py::C::f", "slow")))
    assert sorted(entry.nodeid for entry in actual) == ["a.py::f[1]", "b.py::f[3]"]


def test_three_parts_are_all_and_of_the_matrix_the_short_one_has_the_first_cases() -> None:
    inputs = items(
        ("a.py::f[1]", "long"), ("a.py::f[2]", "long"), ("a.py::g[1]",), ("a.py::g[2]",), ("b.py::f", "long"),
        ("b.py::g[1]", "long", "every"), ("b.py::g[2]", "long", "every"),
    )  # fmt: skip
    parts = {wanted: sorted(entry.nodeid for entry in part(inputs, wanted)) for wanted in ("short", "long", "matrix")}
    assert parts == {
        "short": ["a.py::f[1]", "a.py::g[1]", "a.py::g[2]"],
        "long": ["b.py::f", "b.py::g[1]", "b.py::g[2]"],
        "matrix": ["a.py::f[2]"],
    }


class Item(SimpleNamespace):
    __hash__ = object.__hash__

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(kwargs={"every": "every" in self.marks}) if name in self.marks else None


def items(*inputs: tuple[str, ...]) -> Any:
    """Of names, with their marks."""
    return [Item(nodeid=name, marks=marks) for name, *marks in inputs]


def test_every_folder_has_tests_that_are_not_slow() -> None:
    for folder in (path for path in TESTS.iterdir() if any(path.glob("test_*.py"))):
        functions = (
            entry
            for path in folder.glob("test_*.py")
            for entry in ast.walk(ast.parse(path.read_text()))
            if isinstance(entry, ast.FunctionDef) and entry.name.startswith("test_")
        )
        marks = [{ast.unparse(mark) for mark in function.decorator_list} for function in functions]
        quick = [mark for mark in marks if "pytest.mark.slow" not in mark]
        assert quick, folder.name
