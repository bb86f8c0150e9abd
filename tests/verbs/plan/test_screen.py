"""Output of `plan`: printed layouts can be given back, words stay whole at any width, colours are for terminals."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from meshwright.interface.planning.plan_request import requested_plan
from meshwright.interface.terminal import screen_text as text
from meshwright.planner.search.ranking import LISTED, search
from meshwright.planner.search.recommend import ALIKE, merge_alike
from meshwright.planner.step.predict import build_estimator
from meshwright.spec.units import short_gib
from meshwright.verbs.main import main
from meshwright.verbs.plan.screen import ALTERNATIVES

TWENTY = [
    "gpt2-124m h100x1",
    "gpt2-355m a100x8",
    "gpt2-774m h100x4",
    "mistral-7b-v0.3 h100x8",
    "llama-2-7b a100x8",
    "llama-2-13b h100x8 --nodes 3",
    "llama-2-70b h100x8 --nodes 4",
    "llama-3.2-1b h100x1",
    "llama-3.2-1b h100x8 --recipe sequence=32768",
    "llama-3.1-8b h100x8",
    "llama-3.1-8b h100x8 --nodes 4",
    "llama-3.1-8b h200x8 --nodes 2",
    "llama-3.1-8b a100x8 --nodes 8 --recipe global_batch=64",
    "llama-3.1-8b h100x8 --nodes 4 --recipe sequence=131072,global_batch=16",
    "llama-3.1-70b h100x8 --nodes 2",
    "qwen3-0.6b h100x2",
    "qwen3-8b h100x8",
    "qwen3-30b-a3b h100x8 --nodes 2",
    "mixtral-8x7b h100x8 --nodes 4",
    "qwen2.5-7b h100x8 --nodes 2",
]
ROW = re.compile(r"^ +[\d.,]+ (?:ms|s) +[\d.]+% +[\d.,]+ [GM]iB [ !] +(?:[\d.]+%  )?(\S.*?)(?: \(vp=.*)?$")
VERDICT = re.compile(r"^  (?:FITS|TIGHT|DOES NOT FIT)  (\S.*?)(?: \(.*)?$")


def words(asked: str) -> list[str]:
    model, cluster, *others = asked.split()
    return ["plan", model, "--cluster", cluster, *others]


def printed(message: str) -> list[str]:
    """Return the layouts in a plan's lines, the recommended one first."""
    return [match[1] for line in message.splitlines() for match in [VERDICT.match(line) or ROW.match(line)] if match]


def document(command: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*command, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize("asked", TWENTY)
@pytest.mark.long
def test_a_printed_layout_given_back_is_the_same(
    asked: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recommended layout and each alternative give one layout, with the same fields and figures."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(words(asked)) == 0
    shown = printed(capsys.readouterr().out)
    before = document(words(asked), capsys)
    ranked = {json.dumps(layout["layout"]): layout for layout in before["layouts"]}
    apart = {json.dumps({**layout["layout"], "vp": 0}) for layout in before["layouts"]}
    assert len(shown) == len(set(shown)) >= min(1 + ALTERNATIVES, len(apart))
    for layout in shown:
        again = document([*words(asked), "--layout", layout], capsys)
        assert again["legal"] == 1, layout
        row = ranked.pop(json.dumps(again["plan"]["layout"]))
        assert (again["step_seconds"], again["peak_bytes"]) == (row["step_seconds"], row["peak_bytes"])
        if layout == shown[0]:
            assert again["plan"]["layout"] == before["plan"]["layout"]


def test_the_examples_of_what_is_too_large_can_be_given_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = words("llama-3.1-8b h100x8 --recipe global_batch=64,sequence=8192")
    assert main([*command, "--details"]) == 0
    examples = re.findall(
        r"One of the nearest needs ([\d.]+ GiB), .* over the usable memory: (.*)", capsys.readouterr().out
    )
    assert examples
    for size, layout in examples:
        assert main([*command, "--layout", layout]) == 3
        assert f"needs {size} per device" in capsys.readouterr().err


def test_rows_that_differ_in_virtual_stages_alone_are_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    asked = requested_plan("llama-3.1-70b", "h100x8", 2, [])
    best = search(build_estimator(asked), asked).best
    rows = merge_alike(best)
    assert 1 + sum(len(vps) for _, vps in rows[:1]) + len(rows[1:]) <= len(best) and len(rows) < len(best)
    for first, vps in rows:
        for other in best:
            alike = replace(first.plan.layout, vp=other.plan.layout.vp) == other.plan.layout
            if other is not first and other.plan.layout.vp in vps and alike:
                assert abs(other.step_s / first.step_s - 1) < ALIKE
    assert main(words("llama-3.1-70b h100x8 --nodes 4")) == 0  # of 2 nodes none is shown
    assert "same speed with vp=" in capsys.readouterr().out


def test_half_the_devices_are_said_where_their_layout_is_as_free(capsys: pytest.CaptureFixture[str]) -> None:
    """Only a free search answers for half the devices."""
    command = [*words("llama-3.1-8b h100x8 --nodes 4"), "--details"]
    outputs = []
    for layout in ([], ["--layout", "tp=8"]):
        assert main([*command, *layout]) == 0
        outputs.append("Half the devices" in capsys.readouterr().out)
    assert outputs == [True, False]


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_no_word_is_broken_and_nothing_is_coloured(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every width has the words of the widest, in order, and no line beyond the terminal."""
    command = [*words("llama-3.1-8b h100x8 --nodes 2"), "--details", "--tokens", "1T", "--price", "2"]
    lines = []
    for width in (10_000, columns):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(text, "WIDEST", max(width, 200))
        assert main(command) == 0
        lines.append(capsys.readouterr().out)
    without_bar = [text.translate({ord(cell): None for cell in "\u2588\u2591"}) for text in lines]
    assert without_bar[0].split() == without_bar[1].split()
    assert max(map(len, lines[1].splitlines())) <= columns
    assert "\x1b" not in lines[1]


def test_colour_is_for_verdicts_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert text.coloured("FITS", "green") == "\x1b[1;32mFITS\x1b[0m"
    monkeypatch.setenv("TERM", "dumb")
    assert text.coloured("FITS", "green") == "FITS"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert text.coloured("FITS", "green") == "FITS"


def test_a_verdict_comes_first_also_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("llama-3.1-405b h100x8")) == 3
    output = capsys.readouterr()
    assert output.out.splitlines()[2].startswith("  DOES NOT FIT  ") and " too much" in output.out
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(("zero", "code"), [(3, 0), (0, 3)], ids=["fits", "does not fit"])
def test_details_have_memory_and_traffic_whether_it_fits_or_not(
    zero: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZeRO-3 gathers every parameter twice in a step of one micro-batch, and scatters its gradient once."""
    layout = f"--layout dp_shard=32,zero={zero},micro_batch=1,recompute=none --recipe global_batch=32"
    assert main([*words(f"llama-3.1-8b h100x8 --nodes 4 {layout}"), "--details"]) == code
    printed = capsys.readouterr().out
    assert "Memory at the peak, GiB" in printed and "Sent by the first rank in a step, GB" in printed
    gathered = re.search(r"all_gather +[\d,]+ calls? +([\d.]+)", printed)
    if zero == 3:
        assert gathered is not None
        assert float(gathered[1]) == pytest.approx(2 * 2 * 8.03 * 31 / 32, rel=0.05)


def test_tensor_parallelism_between_nodes_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    asked = words("llama-3.1-405b h100x8 --nodes 256")
    fixed = ["--layout", "dp_shard=16 zero=1 tp=16 sp pp=8 interleaved vp=8 micro_batch=1 recompute=none"]
    assert main([*asked, *fixed]) == 0
    assert "spans nodes" not in capsys.readouterr().out, "it was asked for"
    assert main([*asked, "--layout", "pp=8,schedule=interleaved,recompute=none,cp=1,vp=8,micro_batch=1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "tp=16 spans nodes of 8 devices. With tp=8 or less none fits with 95%." in printed


def test_top_says_how_many(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = words("llama-3.1-8b h100x8")
    for number in (1, 7):
        assert main([*command, "--top", str(number)]) == 0
        assert len(printed(capsys.readouterr().out)) == 1 + number
        assert main([*command, "--top", str(number), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert len(document["layouts"]) == 1 + number
        assert document["plan"]["layout"] in [layout["layout"] for layout in document["layouts"]]
    assert main([*command, "--top", "30"]) == 0
    assert LISTED < len(printed(capsys.readouterr().out)) <= 31, "some are merged"
    assert main([*command, "--top", "0"]) == 2


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_the_list_of_verbs_and_long_lines_keep_to_the_width(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns and "\x1b" not in printed
    long = "  " + "word " * 60
    lines = list(text.folded(["a  table  row", long]))
    assert lines[0] == "a  table  row" and max(map(len, lines)) <= columns
    assert " ".join(lines[1:]).split() == long.split() and all(line.startswith("    ") for line in lines[2:])
    monkeypatch.delenv("COLUMNS")
    assert list(text.folded([long])) == [long], "a pipe's lines are not broken"


def test_the_recommended_is_explained_where_others_are_faster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cases = {"h100x4 --nodes 3": "recommended: the fastest that fits with 95%)", "b200x8": "recommended)"}
    for cluster, told in cases.items():
        asked = words(f"llama-3.1-8b {cluster}")
        printed_document = document(asked, capsys)
        faster = [
            layout
            for layout in printed_document["layouts"]
            if layout["step_seconds"] < printed_document["step_seconds"]
        ]
        assert bool(faster) == ("fastest" in told)
        assert all(layout["peak_bytes"] > printed_document["peak_bytes"] for layout in faster)
        assert main(asked) == 0
        assert capsys.readouterr().out.splitlines()[2].partition(" (")[2] == told


def test_of_equal_layouts_the_lower_stage_of_zero_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """With one micro-batch gradients are reduced once, so stages 1 and 2 are equal."""
    asked = words("llama-3.1-8b h100x8 --nodes 64")
    printed_document = document(asked, capsys)["layouts"]
    assert printed_document[0]["layout"]["zero"] == 1
    alike = [layout for layout in printed_document if layout["layout"] == {**printed_document[0]["layout"], "zero": 2}]
    assert alike and alike[0]["step_seconds"] == printed_document[0]["step_seconds"]
    assert main(asked) == 0
    assert "Why: with zero=0 it " in capsys.readouterr().out


def test_a_batch_that_no_power_of_2_can_be_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "A step takes 576 sequences: 9 devices cannot share a power of 2 evenly."
    layout = ["--layout", "zero=3,micro_batch=1,recompute=none,cp=1,tp=1,pp=1"]
    for asked, told in (("h100x9", True), ("h100x8", False), ("h100x9 --recipe global_batch=576", False)):
        assert main([*words(f"llama-3.1-8b {asked}"), *layout]) == 0
        assert (sentence in " ".join(capsys.readouterr().out.split())) == told


def test_gpus_of_a_node_which_device_and_what_would_fit_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The figure for --tune lora equals that of its own plan."""
    command = ["plan", "llama-2-13b", "--cluster", "a100", "--gpus", "2"]
    assert main(command) == 3
    output = capsys.readouterr()
    assert "2 A100-SXM-80" in output.out and "a100 is taken as A100-SXM-80 (80 GiB)" in " ".join(output.out.split())
    assert main([*command, "--tune", "lora", "--json"]) == 0
    peak = json.loads(capsys.readouterr().out)["peak_bytes"]
    assert f"train adapters alone (--tune lora fits at {short_gib(peak)})" in output.err
    assert main(["plan", "llama-2-13b", "--cluster", "a100x4", "--gpus", "2"]) == 2
    machines = [
        ["plan", "llama-3.1-8b", "--cluster", "p4d.24xlarge", "--nodes", "2", "--json", *more]
        for more in ([], ["--gpus", "8"])
    ]
    capsys.readouterr()
    plain, counted = (main(words) or json.loads(capsys.readouterr().out) for words in machines)
    assert plain == counted, "the network of the machine stays"
    assert main(["plan", "llama-3.1-8b", "--cluster", "p5.4xlarge", "--gpus", "8"]) == 2
    assert "--cluster p5.4xlarge has 1 devices: leave --gpus out" in capsys.readouterr().err
