"""Functions and structs of the C sources for ctypes, read from the sources: nothing is declared twice.

Read are functions without `static` that begin a line, and `typedef struct { ... } Name;`, as this folder writes them.
"""

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TYPES: dict[str, Any] = {"void": None, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
POINTER = ctypes.c_void_p
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_FUNCTION = re.compile(r"^(?!static\b)(\w+) (\w+)\(([^)]*)\) \{", re.MULTILINE)
_DECLARATOR = re.compile(r"(\**)(\w+)(?:\[(\d+)\])?")


def declare_functions(library: ctypes.CDLL, names: Sequence[str]) -> None:
    """Give the library's functions the argument types and results that the C sources `names` define."""
    for name in names:
        for result, function_name, parameters in _FUNCTION.findall(_read(FOLDER / name)):
            function = getattr(library, function_name)
            function.argtypes = [_parameter_type(text) for text in parameters.split(",") if text != "void"]
            function.restype = TYPES[result]


@cache
def structure(name: str) -> type[ctypes.Structure]:
    """Return the ctypes class of a C struct, such as `Panels`. Its fields are named as in C."""
    opening = re.compile(rf"typedef struct \{{([^}}]*)\}} {name};")
    for path in sorted(FOLDER.glob("*.[ch]")):
        if match := opening.search(_read(path)):
            fields = [field for line in match[1].split(";")[:-1] for field in _fields(line)]
            return type(name, (ctypes.Structure,), {"_fields_": fields})
    raise KeyError(f"no C source declares struct {name}")


@cache
def _read(path: Path) -> str:
    """Return a source without its comments."""
    return _COMMENT.sub("", path.read_text(encoding="utf-8"))


def _parameter_type(text: str) -> Any:
    return POINTER if "*" in text else TYPES[text.removeprefix("const ").split()[0]]


def _fields(line: str) -> list[tuple[str, Any]]:
    """Return the names and types that one line of a struct declares, such as `const float *cosine, *sine`."""
    base, declarators = line.strip().removeprefix("const ").split(maxsplit=1)
    fields = []
    for declarator in declarators.split(","):
        match = _DECLARATOR.fullmatch(declarator.strip())
        assert match is not None, f"not a field of a struct: {line.strip()}"
        stars, name, count = match.groups()
        kind = POINTER if stars else TYPES[base] if base in TYPES else structure(base)
        fields.append((name, kind * int(count) if count else kind))
    return fields
