"""`meshwright plan`: the answer, its document, the saved plan, and what it says to bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright import planfile
from meshwright.cli.main import main

SMALL = ["plan", "llama-3.2-1b", "--cluster", "h100x8", "--recipe", "global_batch=64", "--recipe", "sequence=4096"]
ONE = [*SMALL, "--layout", "dp=8,dp_shard=8,zero=3,tp=1,cp=1,pp=1,micro_batch=1,recompute=full"]
DOCUMENT = {
    "source", "plan", "peak_bytes", "peak_rank", "memory", "traffic", "time", "step_seconds",
    "tokens_per_second_per_device", "mfu_causal", "mfu_full", "hfu", "bubble_fraction",
}  # fmt: skip


def test_the_document_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= DOCUMENT | {"layouts", "rejected"}
    assert found["source"] == "predicted"
    assert sum(one["bytes"] for one in found["memory"]) == pytest.approx(found["peak_bytes"], rel=1e-6)
    assert sum(one["seconds"] for one in found["time"]) == pytest.approx(found["step_seconds"], rel=1e-9)
    tokens = found["plan"]["recipe"]["global_batch"] * found["plan"]["recipe"]["sequence"]
    assert found["tokens_per_second_per_device"] == pytest.approx(tokens / found["step_seconds"] / 8)
    times = [one["step_seconds"] for one in found["layouts"]]
    assert times[0] == found["step_seconds"] and times == pytest.approx(sorted(times), rel=1e-2)
    assert found["rejected"] and all(one["reason"] and one["count"] for one in found["rejected"])


def test_one_layout_has_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["layouts"]) == found["legal"] == 1
    assert found["plan"]["layout"]["recompute"] == "full" and found["plan"]["layout"]["dp_shard"] == 8


def test_words_say_what_fits_and_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--tokens", "1T", "--price", "2"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[2].startswith("Fits: ") and " of 80 GiB" in said
    for words in (
        "Fastest of",
        "MFU",
        "Half the devices",
        "Longer: ",
        "1T tokens",
        "at 2 a device hour",
        "To run it: ",
    ):
        assert words in said, words


def test_the_saved_plan_is_the_best_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.yaml"
    assert main([*SMALL, "--save", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    saved = planfile.read(file)
    assert saved.violations() == []
    assert saved.layout.tp == found["plan"]["layout"]["tp"] and saved.recipe.global_batch == 64
    assert main(["plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(found["step_seconds"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "llama-3.1-8", "--cluster", "h100x8"], "nearest: llama-3.1-8b"),
        (["plan", "llama-3.1-8b", "--cluster", "h10x8"], "nearest: h100"),
        (["plan", "llama-3.1-8b"], "--cluster is missing"),
        ([*SMALL, "--nodes", "0"], "--nodes 0 must be at least 1"),
        ([*SMALL, "--nodes", "-3"], "--nodes -3 must be at least 1"),
        ([*SMALL, "--recipe", "sequence=-4"], "recipe.sequence=-4 must be at least 1"),
        ([*SMALL, "--recipe", "sequenc=4"], "nearest"),
        ([*SMALL, "--recipe", "nonsense"], "is not KEY=VALUE"),
        ([*SMALL, "--layout", "dp=3"], "does not divide the 8 devices"),
        ([*SMALL, "--layout", "tpp=2"], "nearest: tp"),
        ([*SMALL, "--layout", "tp=0"], "whole number of 1 or more"),
        ([*SMALL, "--layout", "recompute=some"], "none or selective or full"),
        ([*SMALL, "--tokens", "many"], "--tokens many must be a number of 1 or more"),
        ([*SMALL, "--price", "-1"], "--price -1.0 must be"),
        (["plan", "./no/such/folder", "--cluster", "h100x8"], "there is no such folder"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_nothing_fits_is_exit_code_3_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-405b", "--cluster", "h100x8"]) == 3
    error = capsys.readouterr().err
    assert "the nearest needs" in error and "take more nodes" in error and error.count("\n") == 1


def test_a_layout_that_does_not_fit_is_told_its_cheapest_fixes(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "dp=8,dp_shard=8,zero=3,micro_batch=8,recompute=none"
    assert main(["plan", "llama-3.1-8b", "--cluster", "h100x8", "--layout", layout]) == 3
    error = capsys.readouterr().err
    assert "largest: activations" in error and "cheapest fixes: layout." in error and "% time" in error


def test_a_folder_that_is_no_causal_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    assert main(["plan", str(tmp_path / "config.json"), "--cluster", "h100x8"]) == 2
    error = capsys.readouterr().err
    assert "bert" in error and error.count("\n") == 1


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys; from meshwright.cli.main import main; code = main(sys.argv[1:]);"
        "assert code == 0 and not {'torch', 'numpy', 'matplotlib'} & sys.modules.keys(), code"
    )
    subprocess.run([sys.executable, "-c", code, *ONE, "--json"], check=True, stdout=subprocess.DEVNULL)
