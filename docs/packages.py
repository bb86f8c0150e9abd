"""The packages of src/meshwright in the order of their imports: the only list of them.

tests/test_layers.py holds the source against it, and docs/generate.py writes it into the pages.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "meshwright"

TENSORS = {"spec", "compat"}
MODEL = TENSORS | {"kernels", "model", "parallel", "formats"}
STORE = MODEL | {"remote", "data", "planfile", "store"}
TRAINING = STORE | {"training"}
BELOW: dict[str, set[str]] = {
    "spec": set(),
    "compat": set(),
    "remote": {"spec"},
    "planfile": {"spec"},
    "data": {"spec", "remote"},
    "planner": {"spec"},
    "stacks": {"spec", "planner"},
    "kernels": TENSORS,
    "model": TENSORS | {"kernels"},
    "parallel": TENSORS | {"kernels", "model"},
    "formats": MODEL - {"formats"},
    "store": STORE - {"store"},
    "training": TRAINING - {"training"},
    "compress": TRAINING,
    "serving": MODEL | {"data"},
    "observe": TRAINING | {"planner", "serving"},
    "interface": TRAINING | {"planner", "stacks", "compress", "serving", "observe"},
    "verbs": TRAINING | {"planner", "stacks", "observe", "compress", "serving", "interface"},
}
"""What each part may import of the package. `compat` holds private torch names and imports torch alone."""

PLANNER = (
    ("kernels",), ("cost",), ("time", "memory"), ("step", "serving"), ("search", "machine"),
    ("accuracy", "explorer", "rent"),
)  # fmt: skip
"""Folders of `planner`: each imports only those before it. Those of one place do not import each other."""


def holds(name: str) -> str:
    """What a package says of itself: the first sentence of its docstring."""
    text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ").rstrip(".")


def packages(layers: str = "") -> str:
    """A table of the packages, or the order of the planner's folders."""
    if layers == "planner":
        places = (names[0] if len(names) == 1 else f"({', '.join(names)})" for names in PLANNER)
        return f"    {' -> '.join(places)}\n"
    lines = ["| package | holds | may import |", "|---|---|---|"]
    order = list(BELOW)
    for position, name in enumerate(order):
        lower = [f"`{package}`" for package in order[:position] if package in BELOW[name]]
        text = "all above" if position > 1 and len(lower) == position else ", ".join(lower) or "none of them"
        lines.append(f"| `{name}` | {holds(name)} | {text} |")
    return "\n".join(lines) + "\n"
