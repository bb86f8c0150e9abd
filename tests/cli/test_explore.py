"""`meshwright explore` from the command line: one file, one line, bad input as `plan` has it."""

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import main

SMALL = ["explore", "llama-10m", "--cluster", "h100x8", "--recipe", "global_batch=8"]


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main([*SMALL, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: llama-10m on 8 H100-SXM-80; open it in a browser\n"
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_plan_file_is_explored_with_its_recipe(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "page.html"
    plan.write_text("model: llama-tiny\nrecipe: {sequence: 128, global_batch: 4, precision: fp32}\n")
    assert main(["explore", str(plan), "--cluster", "a100-40x8", "--out", str(out)]) == 0
    assert '"recipe":{"sequence":128,"global_batch":4,"precision":"fp32"}' in out.read_text(encoding="utf-8")


def test_nothing_fits_still_writes_the_page(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    words = ["explore", "llama-3.1-405b", "--cluster", "h100x2", "--recipe", "global_batch=4", "--out", str(out)]
    assert main(words) == 0
    assert out.stat().st_size > 50_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explore", "llama-9", "--cluster", "h100x8"], "nearest: llama"),
        (["explore", "llama-10m"], "--cluster is missing"),
        (["explore", "llama-10m", "--cluster", "h100x8", "--nodes", "0"], "--nodes 0 must be at least 1"),
        ([*SMALL, "--recipe", "sequence"], "is not KEY=VALUE"),
        ([*SMALL, "--recipe", "sequence=-4"], "sequence=-4': sequence=-4 must be at least 1"),
        ([*SMALL, "--out", "no/such/folder/page.html"], "there is no folder no/such/folder"),
        ([*SMALL, "--out", "."], "is a folder: name a file"),
        (["explore", "gpt2", "--cluster", "h100x8", "--recipe", "sequence=2048"], "exceeds the 1024 learned positions"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from meshwright.cli.main import main; code = main(sys.argv[1:]);"
        "assert code == 0 and not {'torch', 'numpy', 'matplotlib'} & sys.modules.keys(), code"
    )
    words = [*SMALL, "--out", str(tmp_path / "page.html")]
    subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.DEVNULL)
