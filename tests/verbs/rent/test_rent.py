"""`rent` on the command line: verdict first, every line reproduced by the `plan` that it prints, errors."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.interface.planning.plan_reading import tokens_of, tokens_word
from meshwright.interface.terminal import screen_text
from meshwright.spec.errors import ArgumentError, DoesNotFit
from meshwright.verbs.main import main
from meshwright.verbs.rent import command as verb
from meshwright.verbs.rent.screen import ROWS

ASKED = ["rent", "llama-3.2-1b", "--tokens", "20B", "--nodes", "1,2", "--quick"]
SERVING = ["rent", "llama-3.1-8b", "--serve", "--concurrency", "16", "--devices", "h100,a100", "--nodes", "1"]
Capture = pytest.CaptureFixture[str]


def document(words: list[str], capsys: Capture) -> Any:
    capsys.readouterr()
    assert main(words) == 0
    return json.loads(capsys.readouterr().out)


def test_the_verdict_comes_first(capsys: Capture) -> None:
    assert main([*ASKED, "--deadline", "30d", "--budget", "1000000"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0].startswith("llama-3.2-1b") and "on every cluster" in " ".join(lines[:2])
    assert any(line.startswith("  CHEAPEST that ends within 30 d: ") for line in lines[:5])
    assert "FASTEST within $1,000,000: " in printed and "probability" in printed
    assert "without a price: not tried (--all names them)" in printed
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("device", ["MI355X", "B200", "H100", "H200"])
def test_speeds_that_nobody_measured_are_named_predictions(device: str, capsys: Capture) -> None:
    """Steps of this engine were measured on one H200 alone."""
    assert main(["rent", "llama-3.2-1b", "--tokens", "20B", "--nodes", "1", "--quick", "--devices", device]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "CHEAPEST: " in printed and device in printed
    predicted = f"measured on one H200-SXM alone: on the {device}" in printed and "this is a prediction." in printed
    assert predicted is (device != "H200")


def pasted(message: str) -> list[str]:
    """Return the command below `Again:`, as a shell reads the printed lines."""
    return shlex.split(message[message.index("Again:\n") + len("Again:") :].replace("\\\n", ""))


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_it_fits_and_the_command_can_be_pasted(columns: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for asked in (ASKED, SERVING):
        capsys.readouterr()
        assert main(asked) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.partition("Again:")[0].splitlines())) <= int(columns), printed
        words = pasted(printed)
        command = document([*asked, "--json"], capsys)["cheapest"]["command"]
        assert words == shlex.split(command)
        assert asked is SERVING or words[words.index("--tokens") + 1] == "20B"


@pytest.mark.parametrize(
    "tokens", ["1T", "15T", "1.5B", "999", "1000", "1234567", "0.1K", "7.25M", "123456789123456789", "3333333333.5"]
)
def test_amounts_are_written_as_they_are_read(tokens: str) -> None:
    assert tokens_of(tokens_word(tokens_of(tokens))) == tokens_of(tokens)


def test_amounts_are_written_short() -> None:
    assert [tokens_word(number) for number in (1e12, 1.5e9, 999, 1e3, 2e4)] == ["1T", "1.5B", "999", "1K", "20K"]


@pytest.mark.parametrize("more", [[], ["--tune", "lora"], ["--tune", "qlora"], ["--recipe", "sequence=4096"]])
def test_every_line_is_made_again_by_the_plan_that_it_prints(more: list[str], capsys: Capture) -> None:
    printed_document = document([*ASKED, *more, "--json"], capsys)
    for row in [printed_document["front"][0], printed_document["front"][-1], *printed_document["dominated"][:1]]:
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
    printed_document = document([word for word in ASKED if word != "--quick"] + ["--json"], capsys)
    for row in (printed_document["front"][0], printed_document["front"][-1]):
        words = shlex.split(row["command"])[1:]
        at = words.index("--layout")
        again = document([*words[:at], *words[at + 2 :], "--json"], capsys)
        assert again["step_seconds"] >= row["step_seconds"] * (1 - 1e-9) or again["peak_bytes"] > row["peak_bytes"]


def test_json_is_one_document_with_ranges_and_sources(capsys: Capture) -> None:
    printed_document = document([*ASKED, "--deadline", "30d", "--json"], capsys)
    assert printed_document["cheapest"] in printed_document["front"] and printed_document["budget_usd"] is None
    for row in printed_document["front"]:
        assert row["usd_90"][0] < row["usd"] < row["usd_90"][1]
        assert row["price_source"].count(", ") >= 3 and 0 < row["goodput"] < 1
        assert row["goodput_90"][0] <= row["goodput_90"][1] < 1 and 0 < row["goodput_simulated"] < 1
        assert 0 <= row["deadline_probability"] <= 1 and row["budget_probability"] is None
        assert row["kwh"] is None or row["kwh"] > 0
    bills = [row["usd"] for row in printed_document["front"]]
    assert bills == sorted(bills)


def test_what_cannot_be_met_is_said_and_has_an_exit_code(capsys: Capture) -> None:
    assert main([*ASKED, "--deadline", "1min", "--budget", "1"]) == 3
    printed = capsys.readouterr().out
    assert (
        "NONE that ends within 1 min: the fastest takes " in printed
        and "NONE within $1: the cheapest costs " in printed
    )
    assert main([*ASKED, "--deadline", "1min", "--json"]) == 3
    told = capsys.readouterr()
    assert json.loads(told.out)["cheapest"] is None
    assert "meshwright: --deadline '1 min' cannot be met: the fastest takes " in told.err
    assert main([*ASKED, "--budget", "1"]) == 3
    assert "meshwright: --budget 1 cannot be met: the cheapest possible costs $" in capsys.readouterr().err


def test_without_one_in_time_the_fastest_is_made_again(capsys: Capture) -> None:
    assert main([*ASKED, "--deadline", "1min"]) == 3
    words = pasted(capsys.readouterr().out)
    assert main([*ASKED, "--deadline", "1min", "--json"]) == 3
    front = json.loads(capsys.readouterr().out)["front"]
    assert words == shlex.split(min(front, key=lambda row: row["wall_seconds"])["command"])


def test_what_keeps_the_limits_likely_is_named_beside_what_does_on_average(capsys: Capture) -> None:
    """A mean time just below the deadline is in time with a probability of about a half, and so is a bill."""
    front = document([*ASKED, "--json"], capsys)["front"]
    hours, usd = front[0]["wall_seconds"] / 3600 + 0.01, front[-1]["usd"] + 0.01
    assert main([*ASKED, "--deadline", f"{hours}h", "--budget", str(usd)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    answer = document([*ASKED, "--deadline", f"{hours}h", "--budget", str(usd), "--json"], capsys)
    for row in (answer["likely_in_time"], answer["likely_in_budget"]):
        assert row["usd"] <= usd and row["wall_seconds"] <= 3600 * hours
    for limit, head, average in (("time", "CHEAPEST", front[0]), ("budget", "FASTEST", front[-1])):
        mean, _, likely = printed.partition(f"{head} ")[2].partition(f"LIKELY IN {limit.upper()}: ")
        assert f"{average['nodes']} node" in mean or f": {average['devices']} " in mean
        chance = re.match(rf".*?, in {limit} with a probability (of|above) (\d+)%", likely)
        assert chance and int(chance[2]) >= 90


def test_failures_that_let_no_run_end(capsys: Capture) -> None:
    words = ["rent", "llama-3.2-1b", "--tokens", "1T", "--devices", "h100", "--nodes", "32,64", "--quick"]
    assert main([*words, "--mtbf", "1"]) == 3
    error = capsys.readouterr().err
    assert " with a failure every 1 h of a device: give --mtbf of one device, not of the cluster" in error


def test_a_deadline_and_a_budget_that_no_run_meets_together(capsys: Capture) -> None:
    front = document([*ASKED, "--json"], capsys)["front"]
    hours = front[0]["wall_seconds"] / 3600 - 0.01
    assert main([*ASKED, "--deadline", f"{hours}h", "--budget", str(front[0]["usd"] + 0.01)]) == 3
    assert "no cluster meets both --deadline and --budget" in capsys.readouterr().err


def test_a_long_front_is_thinned(capsys: Capture) -> None:
    words = ["rent", "llama-3.2-1b", "--tokens", "200B", "--quick"]
    printed_document = document([*words, "--deadline", "20d", "--json"], capsys)
    assert len(printed_document["front"]) > ROWS

    def rows(*more: str) -> list[str]:
        assert main([*words, "--deadline", "20d", *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if " x " in line and line.lstrip().startswith("$")]

    every, thinned = rows("--all"), rows()
    assert len(every) == len(printed_document["front"]) and len(thinned) == ROWS
    assert set(thinned) < set(every)
    assert {thinned[0], thinned[-1]} == {every[0], every[-1]}


def test_a_users_prices_and_what_nobody_lists(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("device,usd_per_gpu_hour,provider,source,read_on\nmi325x,2,us,our contract,2026-11-25\n")
    printed_document = document([*ASKED, "--prices", str(file), "--json"], capsys)
    assert {row["device"] for row in printed_document["front"]} == {"MI325X"}
    assert printed_document["front"][0]["price_source"] == "us, our contract, 2026-11-25"
    assert "H100-SXM-80" in printed_document["unpriced"]
    file.write_text("device,usd_per_gpu_hour\nmi325x,cheap\n")
    assert main([*ASKED, "--prices", str(file)]) == 2
    assert f"{file}:2: column usd_per_gpu_hour: 'cheap' must be a number above 0" in capsys.readouterr().err


def test_dearer_conditions_cost_more() -> None:
    words: dict[str, Any] = {"tokens": "20B", "nodes": [2], "devices": ["h100"], "quick": True}
    plain = mw.rent("llama-3.2-1b", **words)
    worse = mw.rent("llama-3.2-1b", mtbf=100, **words)
    checked = mw.rent("llama-3.2-1b", evaluation=0.5, **words)
    assert plain.front[0].usd < worse.front[0].usd and plain.front[0].usd < checked.front[0].usd
    assert plain.front[0].prediction.step_s == worse.front[0].prediction.step_s


def test_epochs_of_a_dataset_are_its_tokens() -> None:
    words: dict[str, Any] = {"nodes": [1], "devices": ["h100"], "quick": True}
    first = mw.rent("llama-3.2-1b", dataset_size="5B", epochs=2, **words)
    assert first.asked.tokens == 1e10
    assert first.front[0].usd == mw.rent("llama-3.2-1b", tokens="10B", **words).front[0].usd
    assert first.to_pandas is not None and "days" in repr(first) and "<table" in first._repr_html_()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the length of the run: --tokens 1T"),
        (["--tokens", "1T", "--dataset-size", "1B"], "give the length of the run"),
        (["--tokens", "1T", "--epochs", "3"], "--epochs is for --dataset-size"),
        (["--tokens", "0"], "--tokens 0 must be a number of 1 or more"),
        (["--tokens", "1B", "--deadline", "soon"], "--deadline soon must be a time above 0"),
        (["--tokens", "1B", "--budget", "-1"], "--budget -1 must be a number of dollars above 0"),
        (["--tokens", "1B", "--devices", "h1000"], "--devices h1000 is not known; nearest"),
        (["--tokens", "1B", "--devices", "mi325x"], "has no price in"),
        (["--tokens", "1B", "--devices", "t4"], "--devices t4 has no bf16_flop_per_s"),
        (["--tokens", "1B", "--nodes", "0"], "--nodes 0 must be at least 1"),
        (["--tokens", "1B", "--nodes", "two"], "--nodes two must be whole numbers"),
        (["--tokens", "1B", "--mtbf", "0"], "--mtbf 0 must be at least 1"),
        (["--tokens", "1B", "--latency", "5"], "--latency is for serving: add --serve"),
        (["--serve", "--tokens", "1B"], "--tokens is for training: leave out --serve"),
        (["--serve", "--latency", "0"], "--latency 0 must be a number of milliseconds above 0"),
        (["--tokens", "1B", "--html", "page.txt"], "name a file that ends in .html"),
        (["--tokens", "1B", "--tune", "dora"], "--tune dora is not known"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: Capture) -> None:
    assert main(["rent", "llama-3.2-1b", *words]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.out == "" and told.err.count("\n") == 1


def test_what_is_too_large_for_every_cluster(capsys: Capture) -> None:
    words = ["rent", "llama-3.1-405b", "--tokens", "1B", "--nodes", "1", "--devices", "a100-40", "--quick"]
    assert main(words) == 3
    assert "fits on none of 4 clusters" in capsys.readouterr().err
    with pytest.raises(DoesNotFit, match="takes longer than 1 year"):
        mw.rent("llama-3.1-405b", tokens="900T", nodes=[64], devices=["b200"], quick=True)
    with pytest.raises(ArgumentError, match="latency"):
        mw.rent_serving("llama-3.2-1b", latency=-1.0)


def test_serving_is_made_again_by_the_plan_that_it_prints(capsys: Capture) -> None:
    printed_document = document([*SERVING, "--latency", "12", "--json"], capsys)
    assert printed_document["cheapest"]["per_token_seconds"] <= 0.012
    assert printed_document["cheapest"]["users_within_latency"] >= 16
    for row in (printed_document["front"][0], printed_document["cheapest"], printed_document["front"][-1]):
        again = document([*shlex.split(row["command"])[1:], "--json"], capsys)["best"]
        for name in ("per_token_seconds", "first_token_seconds", "tokens_per_second"):
            assert again[name] == row[name]
    prices = [row["usd_per_hour"] for row in printed_document["front"]]
    times = [row["per_token_seconds"] for row in printed_document["front"]]
    assert prices == sorted(prices) and times == sorted(times, reverse=True)


def test_serving_in_words(capsys: Capture) -> None:
    assert main([*SERVING, "--latency", "12"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "CHEAPEST within 12 ms per token: " in printed and "per million tokens" in printed
    assert main([*SERVING, "--latency", "0.001"]) == 3
    told = capsys.readouterr()
    assert "NONE within 0.001 ms per token: the fastest takes " in told.out
    assert "meshwright: --latency 0.001 cannot be met: the fastest possible takes " in told.err
    assert main(["rent", "llama-3.1-405b", "--serve", "--devices", "a100-40", "--nodes", "1"]) == 3


def test_nodes_that_serve_are_those_that_were_asked_for() -> None:
    answer = mw.rent_serving("llama-3.2-1b", devices=["h100"], nodes=[2], concurrency=16)
    assert {run.offer.nodes for run in answer.swept.runs} == {2}


def test_large_figures_have_no_exponent(tmp_path: Path, capsys: Capture) -> None:
    """A run of more than a hundred days, nodes of more than a thousand dollars per hour."""
    file = tmp_path / "mine.csv"
    file.write_text("device,usd_per_gpu_hour\nh100,1234.5\n")
    words: dict[str, Any] = {"prices": file, "devices": ["h100"], "nodes": [1]}
    slow = mw.rent("llama-3.2-1b", tokens="2T", quick=True, **words)
    assert slow.recommended.wall_s > 100 * 86_400 or slow.front[0].wall_s > 100 * 86_400
    served = mw.rent_serving("llama-3.1-8b", concurrency=1, **words)
    texts = [repr(slow), slow._repr_html_(), repr(served), served._repr_html_()]
    assert main(["rent", "llama-3.1-8b", "--serve", "--concurrency", "1", "--nodes", "1", "--prices", str(file)]) == 0
    assert not any("e+0" in text for text in (*texts, capsys.readouterr().out))


def test_conditions_are_said_as_they_were_given(capsys: Capture) -> None:
    words = ["rent", "llama-3.2-1b", "--tokens", "20B", "--nodes", "1", "--devices", "h100", "--quick"]
    assert main(words) == 0
    assert "hours of a device (Llama 3)," in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--mtbf", "9000", "--deadline", "500d"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "every 9,000 hours of a device, 1%" in printed and "take over 500 d," in printed


def test_clusters_that_are_too_slow_are_not_said_to_be_too_small(capsys: Capture) -> None:
    words = ["rent", "llama-3.1-70b", "--tokens", "20B", "--devices", "h100,rtx3090", "--nodes", "1", "--quick"]
    assert main(words) == 3
    errors = capsys.readouterr().err
    assert "fits on none of 4 clusters with memory to spare, and takes longer than 1 year on the other 1" in errors


def test_whoever_waits_is_told_why(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_text, "PATIENCE_S", 0.0)
    main(ASKED)
    assert capsys.readouterr().err == f"{verb.SEARCHING}\n"
