"""The notebook in examples/ runs from its first cell to its last, and shows output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interface.test_markup import parsed

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOK = ROOT / "examples" / "plan_and_train.ipynb"


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path) -> None:
    """In a fresh process and an empty folder."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[1:] = [{str(NOTEBOOK)!r}]\n"
    code += "import runpy; runpy.run_module('tests.interface.cells', run_name='__main__')"
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert finished.returncode == 0, finished.stderr
    cells = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(cells) == sum(cell["cell_type"] == "code" for cell in json.loads(NOTEBOOK.read_text())["cells"])
    assert all(parsed(cell["html"]).text for cell in cells if cell["html"])
    assert sum(bool(cell["html"]) for cell in cells) >= 7
    assert any("fits" in cell["printed"] for cell in cells), "the refusal is printed"


def test_the_notebook_is_kept_without_what_it_showed() -> None:
    """Output depends on the machine and would go stale."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert not [cell["id"] for cell in code if any(line.startswith(("%", "!")) for line in cell["source"])], "no magics"
