"""`meshwright explore` on the command line: one file, one line, and the errors of `plan`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.interface.terminal import screen_text
from meshwright.verbs.explore import command as verb
from meshwright.verbs.main import main

SMALL = ["explore", "llama-10m", "--cluster", "h100x8", "--recipe", "global_batch=8"]


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main([*SMALL, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: llama-10m on 8 H100-SXM-80; open it in a browser\n"
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_wait_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen_text, "PATIENCE_S", 0.0)
    assert main([*SMALL, "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().err == f"{verb.COUNTING}\n"


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
    ("words", "message"),
    [
        (["explore", "llama-9", "--cluster", "h100x8"], "nearest: llama"),
        (["explore", "llama-10m"], "--cluster is missing"),
        (["explore", "llama-10m", "--cluster", "h100x8", "--nodes", "0"], "--nodes 0 must be at least 1"),
        ([*SMALL, "--recipe", "sequence"], "is not KEY=VALUE"),
        ([*SMALL, "--recipe", "sequence=-4"], "recipe.sequence=-4 must be at least 1"),
        ([*SMALL, "--out", "no/such/folder/page.html"], "there is no folder no/such/folder"),
        ([*SMALL, "--out", "."], "is a folder: name a file"),
        ([*SMALL, "--for", "torchtian"], "nearest: torchtitan"),
        ([*SMALL, "--for", "torchtitan"], "torchtitan has no configuration of llama-10m"),
        ([*SMALL, "--price", "0"], "--price 0 must be above 0"),
        ([*SMALL, "--beside", "h200x8"], "is not KEY=VALUE, as 'cluster=h200x8'"),
        ([*SMALL, "--beside", "clustr=h200x8"], "nearest: cluster"),
        ([*SMALL, "--beside", "stak=torchtitan"], "known: cluster, nodes, for, price"),
        ([*SMALL, "--beside", "nodes=two"], "must be a whole number"),
        ([*SMALL, "--beside", "nodes=2,nodes=4"], "has nodes twice"),
        ([*SMALL, "--beside", "price=cheap"], "must be a number of dollars per device-hour"),
        ([*SMALL, "--beside", "cluster=h900x8"], "beside: --cluster h900x8"),
        ([*SMALL, "--beside", "nodes=0"], "beside: --nodes 0 must be at least 1"),
        ([*SMALL, "--beside", "cluster=h100x7"], "give a global_batch that suits both"),
        (["explore", "gpt2", "--cluster", "h100x8", "--recipe", "sequence=2048"], "exceeds the 1024 learned positions"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from meshwright.verbs.main import main; code = main(sys.argv[1:]);"
        "assert code == 0 and not {'torch', 'numpy', 'matplotlib'} & sys.modules.keys(), code"
    )
    words = [*SMALL, "--out", str(tmp_path / "page.html")]
    subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.DEVNULL)


def test_two_halves_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    words = ["--beside", "nodes=2,for=torchtitan", "--price", "2", "--json", "--out", str(out)]
    words = ["explore", "llama-3.2-1b", "--cluster", "h100x4", "--recipe", "sequence=2048,global_batch=16", *words]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"kind", "model", "halves", "b_over_a", "page"} == document.keys() and document["page"] == str(out)
    a, b = document["halves"]
    assert (a["devices"], a["for"], b["devices"], b["for"]) == (4, "meshwright", 8, "torchtitan")
    assert a["usd_per_billion_tokens"] == pytest.approx(2 * 4 * 1e9 / a["tokens_per_second"] / 3600)
    assert b["usd_per_device_hour"] == 2 and b["known_errors"] and not a["known_errors"]
    assert document["b_over_a"]["peak_bytes"] == pytest.approx(b["peak_bytes"] / a["peak_bytes"])
    asked = ["plan", "llama-3.2-1b", "--cluster", "h100x4", "--recipe", "sequence=2048,global_batch=16", "--json"]
    layout = ",".join(f"{key}={str(value).lower()}" for key, value in a["layout"].items() if key != "schedule")
    assert main([*asked, "--layout", layout]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(a["step_seconds"])


def test_the_interface_writes_the_same_page(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main([*SMALL, "--out", str(out)]) == 0
    answer = mw.explore("llama-10m", cluster="h100x8", recipe={"global_batch": 8})
    assert answer.write(tmp_path / "other.html").stat().st_size == pytest.approx(out.stat().st_size, rel=0.001)
    assert "llama-10m" in repr(answer) and "tokens/s" in answer._repr_html_() and len(answer.rows()) == 1
