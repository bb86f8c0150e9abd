"""`plan --serve` on the command line and in Python."""

import json

import pytest

import meshwright as mw
from meshwright.spec.errors import DoesNotFit, PlanError
from meshwright.verbs.main import main

ASKED = ["plan", "llama-3.1-8b", "--cluster", "h100x8", "--serve"]


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(ASKED) == 0
    lines = capsys.readouterr().out.splitlines()
    message = " ".join(" ".join(lines).split())
    assert "64 in flight" in " ".join(lines[:2]) and lines[3].startswith("  FITS  tp=")
    assert "tokens/s" in message and "sequences at most" in message and "2.0 bytes per parameter in weights" in message
    assert max(map(len, lines)) <= 80


def test_json_has_every_layout_and_the_curve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--concurrency", "8", "--kv-dtype", "fp8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    layouts = [document["best"], *document["alternatives"]]
    assert {layout["tp"] for layout in layouts} == {1, 2, 4, 8}
    assert document["best"]["tokens_per_second"] == max(layout["tokens_per_second"] for layout in layouts)
    assert document["best"]["cache_bytes_per_token"] * document["best"]["tp"] == 32 * 2 * 8 * 128
    rates = [point["tokens_per_s"] for point in document["curve"]]
    assert rates == sorted(rates)


def test_one_degree_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--layout", "tp=2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"]["tp"] == 2 and document["alternatives"] == []


def test_what_does_not_fit_names_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-405b", "--cluster", "h100x8", "--serve", "--json"]) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out)["fits"] is False
    assert "--quantization fp8" in printed.err and "usable" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "3T"], "--tokens is for training"),
        (["--tune", "lora"], "--tune is for training"),
        (["--for", "megatron-lm"], "--for is for training"),
        (["--quantization", "int1"], "take one of"),
        (["--kv-dtype", "fp2"], "take one of"),
        (["--framework", "tgi"], "take one of"),
        (["--layout", "dp=2"], "tp=N alone"),
        (["--layout", "tp=3"], "does not divide both"),
        (["--input-length", "140000"], "shorten one"),
        (["--concurrency", "-1"], "must be at least 1"),
        (["--cluster", "local"], "For this machine run calibrate"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_load_without_serve_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--cluster", "h100x8", "--concurrency", "3"]) == 2
    assert "add --serve" in capsys.readouterr().err


def test_python_gives_the_same_and_a_table() -> None:
    answer = mw.plan_serving("llama-3.1-8b", cluster="h100x8", concurrency=16)
    assert answer.best is answer.layouts[0] and "requests at most" in repr(answer)
    assert [row["layout"] for row in answer.rows()] == [layout.words for layout in answer.layouts]
    assert "<table" in answer._repr_html_()
    with pytest.raises(DoesNotFit):
        mw.plan_serving("llama-3.1-405b", cluster="l40sx8")
    with pytest.raises(PlanError):
        mw.plan_serving("llama-3.1-8b")


def test_a_load_that_does_not_fit_at_once_waits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "qwen3-32b", "--cluster", "h100x1", "--serve", "--quantization", "fp8", "--concurrency", "512"]
    assert main([*words, "--input-length", "8192"]) == 0
    assert "  WAITS  tp=1" in capsys.readouterr().out
    short = mw.plan_serving("qwen3-32b", cluster="h100", quantization="fp8", concurrency=8)
    assert not short.best.waits and short.best.most_requests >= 8
