"""Run a notebook's code cells in this process, in order: `python -m tests.interface.cells FILE.ipynb`."""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run(file: Path) -> None:
    """Print a JSON line for each code cell. An error ends the run, with its cell."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            print(json.dumps(shown("".join(cell["source"]), f"{file.name}, cell {number}", scope)), flush=True)


def shown(source: str, name: str, scope: dict[str, Any]) -> dict[str, str]:
    """Return what a cell prints, and its last expression as text and HTML."""
    body = ast.parse(source, filename=name).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body=body, type_ignores=[]), name, "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(body=last.value), name, "eval"), scope)
    html = value._repr_html_() if hasattr(value, "_repr_html_") else ""
    return {"source": source, "printed": printed.getvalue(), "text": repr(value), "html": html}


if __name__ == "__main__":
    run(Path(sys.argv[1]))
