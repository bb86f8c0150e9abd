"""`rent` on the command line: verdict first, every line made again by the `plan` that it prints, refusals."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.spec.errors import ArgumentError, DoesNotFit

ASKED = ["rent", "llama-3.2-1b", "--tokens", "20B", "--nodes", "1,2", "--quick"]
Capture = pytest.CaptureFixture[str]


def document(words: list[str], capsys: Capture) -> Any:
    capsys.readouterr()
    assert main(words) == 0
    return json.loads(capsys.readouterr().out)


def test_the_verdict_comes_first(capsys: Capture) -> None:
    assert main([*ASKED, "--deadline", "30d", "--budget", "1000000"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0].startswith("llama-3.2-1b") and "on every cluster" in " ".join(lines[:2])
    assert any(line.startswith("  CHEAPEST that ends within 30 d: ") for line in lines[:5])
    assert "FASTEST within $1,000,000: " in said and "probability" in said
    assert "No price, so not tried: " in said and "Again: meshwright plan" in said
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("more", [[], ["--tune", "lora"], ["--tune", "qlora"], ["--recipe", "sequence=4096"]])
def test_every_line_is_made_again_by_the_plan_that_it_prints(more: list[str], capsys: Capture) -> None:
    found = document([*ASKED, *more, "--json"], capsys)
    for row in [found["front"][0], found["front"][-1], *found["dominated"][:1]]:
        words = shlex.split(row["command"])
        assert words[:2] == ["meshwright", "plan"]
        again = document([*words[1:], "--json"], capsys)
        assert again["step_seconds"] == row["step_seconds"]
        assert again["peak_bytes"] == row["peak_bytes"]
        assert again["mfu_full"] == row["mfu_full"]
        assert again["budget"]["steps"] == row["steps"]
        hours = row["steps"] * row["step_seconds"] / 3600 * row["devices"]
        assert again["budget"]["device_hours"] == pytest.approx(hours, rel=1e-12)
        undisturbed = again["budget"]["price"]
        whole = (row["nodes"] + row["spare_nodes"]) / row["nodes"]
        assert undisturbed / row["goodput"] * whole == pytest.approx(row["usd"], rel=1e-9)


def test_a_search_of_all_layouts_finds_nothing_faster(capsys: Capture) -> None:
    found = document([word for word in ASKED if word != "--quick"] + ["--json"], capsys)
    for row in (found["front"][0], found["front"][-1]):
        words = shlex.split(row["command"])[1:]
        at = words.index("--layout")
        again = document([*words[:at], *words[at + 2 :], "--json"], capsys)
        assert again["step_seconds"] >= row["step_seconds"] * (1 - 1e-9) or again["peak_bytes"] > row["peak_bytes"]


def test_json_is_one_document_with_ranges_and_sources(capsys: Capture) -> None:
    found = document([*ASKED, "--deadline", "30d", "--json"], capsys)
    assert found["cheapest"] in found["front"] and found["budget_usd"] is None
    for row in found["front"]:
        assert row["usd_90"][0] < row["usd"] < row["usd_90"][1]
        assert row["price_source"].count(", ") >= 3 and 0 < row["goodput"] < 1
        assert row["goodput_90"][0] <= row["goodput_90"][1] < 1 and 0 < row["goodput_simulated"] < 1
        assert 0 <= row["deadline_probability"] <= 1 and row["budget_probability"] is None
        assert row["kwh"] is None or row["kwh"] > 0
    bills = [row["usd"] for row in found["front"]]
    assert bills == sorted(bills)


def test_what_cannot_be_met_is_said_and_has_an_exit_code(capsys: Capture) -> None:
    assert main([*ASKED, "--deadline", "1min", "--budget", "1"]) == 3
    said = capsys.readouterr().out
    assert "NONE that ends within 1 min: the fastest takes " in said and "NONE within $1: the cheapest costs " in said
    assert main([*ASKED, "--deadline", "1min", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["cheapest"] is None


def test_a_users_prices_and_what_nobody_lists(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("device,usd_per_gpu_hour,provider,source,read_on\nmi325x,2,us,our contract,2026-11-25\n")
    found = document([*ASKED, "--prices", str(file), "--json"], capsys)
    assert {row["device"] for row in found["front"]} == {"MI325X"}
    assert found["front"][0]["price_source"] == "us, our contract, 2026-11-25"
    assert "H100-SXM-80" in found["unpriced"]
    file.write_text("device,usd_per_gpu_hour\nmi325x,cheap\n")
    assert main([*ASKED, "--prices", str(file)]) == 2
    assert f"{file}:2: column usd_per_gpu_hour: 'cheap' must be a number above 0" in capsys.readouterr().err


def test_dearer_conditions_cost_more() -> None:
    words: dict[str, Any] = {"tokens": "20B", "nodes": [2], "devices": ["h100"], "quick": True}
    plain = mw.rent("llama-3.2-1b", **words)
    worse = mw.rent("llama-3.2-1b", mtbf=100, **words)
    checked = mw.rent("llama-3.2-1b", evaluation=0.5, **words)
    assert plain.front[0].usd < worse.front[0].usd and plain.front[0].usd < checked.front[0].usd
    assert plain.front[0].found.step_s == worse.front[0].found.step_s


def test_epochs_of_a_dataset_are_its_tokens() -> None:
    words: dict[str, Any] = {"nodes": [1], "devices": ["h100"], "quick": True}
    first = mw.rent("llama-3.2-1b", dataset_size="5B", epochs=2, **words)
    assert first.asked.tokens == 1e10
    assert first.front[0].usd == mw.rent("llama-3.2-1b", tokens="10B", **words).front[0].usd
    assert first.to_pandas is not None and "days" in repr(first) and "<table" in first._repr_html_()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say how long the run is: --tokens 1T"),
        (["--tokens", "1T", "--dataset-size", "1B"], "say how long the run is"),
        (["--tokens", "1T", "--epochs", "3"], "--epochs is for --dataset-size"),
        (["--tokens", "0"], "--tokens 0 must be a number of 1 or more"),
        (["--tokens", "1B", "--deadline", "soon"], "--deadline soon must be a time above 0"),
        (["--tokens", "1B", "--budget", "-1"], "--budget -1.0 must be a number of dollars above 0"),
        (["--tokens", "1B", "--devices", "h1000"], "--devices 'h1000' is not known; nearest"),
        (["--tokens", "1B", "--devices", "mi325x"], "has no price of it"),
        (["--tokens", "1B", "--nodes", "0"], "--nodes 0 must be at least 1"),
        (["--tokens", "1B", "--nodes", "two"], "--nodes 'two' must be whole numbers"),
        (["--tokens", "1B", "--mtbf", "0"], "--mtbf 0 must be at least 1"),
        (["--tokens", "1B", "--latency", "5"], "--latency is for serving: add --serve"),
        (["--serve", "--tokens", "1B"], "--tokens is for training: leave out --serve"),
        (["--serve", "--latency", "0"], "--latency 0 must be a number of milliseconds above 0"),
        (["--tokens", "1B", "--html", "page.txt"], "name a file that ends in .html"),
        (["--tokens", "1B", "--tune", "dora"], "--tune 'dora' is not known"),
    ],
)
def test_refusals(words: list[str], said: str, capsys: Capture) -> None:
    assert main(["rent", "llama-3.2-1b", *words]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.out == "" and told.err.count("\n") == 1


def test_what_is_too_large_for_every_cluster(capsys: Capture) -> None:
    words = ["rent", "llama-3.1-405b", "--tokens", "1B", "--nodes", "1", "--devices", "a100-40", "--quick"]
    assert main(words) == 3
    assert "fits on none of 4 clusters" in capsys.readouterr().err
    with pytest.raises(DoesNotFit, match="takes longer than 1 year"):
        mw.rent("llama-3.1-405b", tokens="900T", nodes=[64], devices=["b200"], quick=True)
    with pytest.raises(ArgumentError, match="latency"):
        mw.rent_serving("llama-3.2-1b", latency=-1.0)


SERVING = ["rent", "llama-3.1-8b", "--serve", "--concurrency", "16", "--devices", "h100,a100", "--nodes", "1"]


def test_serving_is_made_again_by_the_plan_that_it_prints(capsys: Capture) -> None:
    found = document([*SERVING, "--latency", "12", "--json"], capsys)
    assert found["cheapest"]["per_token_seconds"] <= 0.012
    assert found["cheapest"]["users_within_latency"] >= 16
    for row in (found["front"][0], found["cheapest"], found["front"][-1]):
        again = document([*shlex.split(row["command"])[1:], "--json"], capsys)["best"]
        for name in ("per_token_seconds", "first_token_seconds", "tokens_per_second"):
            assert again[name] == row[name]
    prices = [row["usd_per_hour"] for row in found["front"]]
    times = [row["per_token_seconds"] for row in found["front"]]
    assert prices == sorted(prices) and times == sorted(times, reverse=True)


def test_serving_in_words(capsys: Capture) -> None:
    assert main([*SERVING, "--latency", "12"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "CHEAPEST within 12 ms per token: " in said and "per million tokens" in said
    assert main([*SERVING, "--latency", "0.001"]) == 3
    assert "NONE within 0.001 ms per token: the fastest takes " in capsys.readouterr().out
    assert main(["rent", "llama-3.1-405b", "--serve", "--devices", "a100-40", "--nodes", "1"]) == 3
