"""`plan --sweep`: a row for each value, equal to what `plan` says of it alone, and refusals as rows."""

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.verbs.main import main
from meshwright.verbs.plan.sweep import plan_sweep

MODEL = ["plan", "llama-3.2-1b", "--cluster", "h100x8", "--recipe", "global_batch=64,sequence=4096"]
FIXED = "pp=1,cp=1,zero=1,micro_batch=1,recompute=none,cuda_graphs=off"


def test_each_row_is_what_plan_says_of_that_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "--layout", FIXED, "--sweep", "tp=1,2,3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sweep"] == ["tp"] and document["fixed"] == FIXED.split(",")
    single, double, triple = document["rows"]
    for row, tp in ((single, 1), (double, 2)):
        assert row["swept"] == {"tp": str(tp)} and row["fits"] and not row["refused"]
        assert main([*MODEL, "--layout", f"{FIXED},tp={tp}", "--json"]) == 0
        alone = json.loads(capsys.readouterr().out)
        assert row["step_seconds"] == alone["step_seconds"]
        assert row["peak_bytes"] == alone["peak_bytes"]
        memory = {part["kind"]: part["bytes"] for part in alone["memory"]}
        assert 0 < row["activations_bytes"] == memory["activations"] < row["peak_bytes"]
        # Throughput and exposed communication by arithmetic of the test's own.
        assert row["tokens_per_second_per_device"] == pytest.approx(64 * 4096 / 8 / row["step_seconds"])
        seconds = {part["what"]: part["seconds"] for part in alone["time"]}
        assert row["exposed_seconds"] == pytest.approx(
            sum(seconds.get(part, 0) for part in ("exchange", "weights", "gradients"))
        )
    assert double["exposed_seconds"] > single["exposed_seconds"]
    assert not triple["fits"] and "does not divide the 8 devices" in triple["refused"] and "tp" not in triple


def test_what_does_not_fit_stays_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.1-70b", "--cluster", "h100x8", "--layout", "zero=3,micro_batch=1,recompute=full"]
    assert main([*words, "--sweep", "nodes=1,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[next(n for n, line in enumerate(lines) if "tok/s/GPU" in line) :]
    assert "legal layouts fits" in table[1] and table[1].split()[0] == "1"
    assert any(line.split()[:1] == ["8"] and "%" in line for line in table)


def test_a_plan_files_layout_stays_but_for_the_swept_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """dp_shard follows tp and pp, pp=1 drops the schedule, and another policy drops the number of layers."""
    file = tmp_path / "plan.yaml"
    words = "dp_replicate=1,dp_shard=4,zero=2,pp=2,schedule=zb-h1,micro_batch=2,recompute=full,recompute_layers=3"
    assert main([*MODEL, "--layout", words, "--save", str(file)]) == 0
    capsys.readouterr()

    def layouts(sweep: str, fixed: str = "plan") -> Iterator[dict[str, object]]:
        assert main(["plan", str(file), "--layout", fixed, "--sweep", sweep, "--json"]) == 0
        for row in json.loads(capsys.readouterr().out)["rows"]:
            assert row["zero"] == row["micro_batch"] == 2 and row["dp_replicate"] == 1
            yield row

    for tp, row in zip((1, 2), layouts("tp=1,2"), strict=True):
        assert (row["tp"], row["dp_shard"], row["schedule"], row["recompute_layers"]) == (tp, 4 // tp, "zb-h1", 3)
    for pp, row in zip((1, 2), layouts("pp=1,2", "plan,recompute=none"), strict=True):
        assert (row["pp"], row["dp_shard"], row["recompute"]) == (pp, 8 // pp, "none")
    for policy, row in zip(("none", "full"), layouts("recompute=none,full"), strict=True):
        assert (row["recompute"], row["dp_shard"], row["schedule"]) == (policy, 4, "zb-h1")
    assert main(["plan", str(file), "--layout", "plan,tp=3"]) == 2
    assert "does not divide the 8 devices" in capsys.readouterr().err


def test_the_terminal_shows_activations_where_no_row_has_a_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    for sweep, shown, hidden in (("recompute=none,full", "act. GiB", "bubble"), ("pp=1,2", "bubble", "act. GiB")):
        assert main([*MODEL, "--layout", "dp_shard=4,tp=2" if hidden == "bubble" else "tp=1", "--sweep", sweep]) == 0
        table = capsys.readouterr().out
        assert shown in table and hidden not in table
        assert max(map(len, table.splitlines())) <= 80


def test_details_show_what_each_zero_stage_holds_and_sends(capsys: pytest.CaptureFixture[str]) -> None:
    """The ZeRO paper's formulas by hand: N parameters in bf16, fp32 masters and sums; n devices, m micro-batches."""
    size, n, m = 1_235_814_400, 8, 8
    head_share = 128_256 * 2_048 / size  # ZeRO-3 keeps its last gather, the head, for the backward pass
    words = "tp=1,pp=1,cp=1,dp_shard=8,micro_batch=1,recompute=none,cuda_graphs=off"
    assert main([*MODEL, "--layout", words, "--sweep", "zero=0,1,2,3", "--details"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(lines) if "sent GB" in line)
    assert lines[start].split() == ["zero", "weights", "grads", "optim.", "act.", "other", "peak", "sent", "GB"]
    gib, share = size / 2**30, (n - 1) / n
    held = [(2, 4, 12), (2 + 4 / n, 4, 8 / n), (2 + 4 / n, 4 / n, 8 / n), (4 / n, 4 / n, 8 / n)]
    sent = [2 * 4, 4 + 2, m * 4 + 2, m * (4 + 2 + 2 * (1 - head_share))]
    for line, bytes_held, bytes_sent in zip(lines[start + 1 : start + 5], held, sent, strict=True):
        *parts, activations, other, peak, sent_gb = map(float, line.split()[1:])
        assert parts == pytest.approx([each * gib for each in bytes_held], abs=0.06)
        assert sum(parts) + activations + other == pytest.approx(peak, abs=0.3)
        assert sent_gb == pytest.approx(bytes_sent * share * size / 1e9, abs=0.06)
    assert max(map(len, lines)) <= 80


def test_whole_layouts_are_compared_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = "dp_replicate=8 zero=0; dp_shard=8,zero=3; tp=8 sp=true"
    fixed = ["--layout", "pp=1,cp=1,micro_batch=1,recompute=none", "--sweep", f"layout={layouts}"]
    assert main([*MODEL, *fixed, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["swept"]["layout"] for row in rows] == [words.strip() for words in layouts.split(";")]
    assert [(row["dp_replicate"], row["dp_shard"], row["zero"], row["tp"], row["sp"]) for row in rows] == [
        (8, 1, 0, 1, False), (1, 8, 3, 1, False), (1, 1, 0, 8, True)
    ]  # fmt: skip
    assert main([*MODEL, *fixed]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "%" in line and line.strip()[0].isdigit()] == ["1", "2", "3"]
    assert max(map(len, lines)) <= 80


def test_two_keys_are_a_grid_and_the_page_has_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "sweep.html"
    sweeps = ["--sweep", "nodes=1,2", "--sweep", "overlap=on,off", "--html", str(page)]
    assert main([*MODEL, "--layout", "dp_shard=8,zero=2,tp=1,pp=1,cp=1,micro_batch=1,recompute=none", *sweeps]) == 0
    assert str(page) in capsys.readouterr().out

    class Cells(HTMLParser):
        rows = lines = 0

        def handle_starttag(self, tag: str, attributes: object) -> None:
            self.rows += tag == "tr"
            self.lines += tag == "polyline"

    cells = Cells()
    cells.feed(page.read_text(encoding="utf-8"))
    assert (cells.rows, cells.lines) == (10, 2)  # both tables with their heads


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--sweep", "tq=1,2"], "'tq' cannot be swept"),
        (["--sweep", "layout=tp=2; tq=2"], "tq"),
        (
            ["--sweep", "layout=tp=2; tp=2"],
            "--sweep 'layout=tp=2; tp=2' must give each value once: write layout='tp=8;",
        ),
        (["--sweep", "layout=;"], "must give each value once"),
        (["--sweep", "layout=tp=2; tp=4", "--sweep", "tp=1,2"], "has tp alone and in a whole layout"),
        (["--sweep", "tp=1,1"], "--sweep tp=1,1 must give each value once"),
        (["--sweep", "tp"], "must give each value once: write KEY=A,B,C"),
        (["--sweep", "nodes=two"], "nodes takes whole numbers"),
        (["--sweep", "nodes=1,2", "--nodes", "2"], "--nodes 2 is swept: leave one of them out"),
        (["--sweep", "tp=2,4", "--layout", "tp=8"], "--layout has tp=8 and tp=2"),
        (["--sweep", "tp=2", "--sweep", "pp=2", "--sweep", "cp=2"], "takes one key or two"),
        (["--sweep", "tp=2", "--save", "plan.yaml"], "--save plan.yaml does not go with --sweep"),
        (["--html", "page.html"], "--html page.html is for --sweep"),
        (["--sweep", "tp=1,2", "--recipe", "sequence=x"], "recipe.sequence"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MODEL, *words]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert sentence in printed


def test_in_python_a_sweep_is_a_dictionary() -> None:
    answer = plan_sweep(
        "llama-3.2-1b", {"tp": [1, 2]}, cluster="h100x8", recipe="global_batch=64,sequence=4096", layout=FIXED
    )
    assert mw.plan_sweep is plan_sweep
    rates = [row["tokens_per_second_per_device"] for row in answer.rows()]
    assert f"{rates[1] / rates[0] - 1:+.0%}" in repr(answer)
