"""Scores of published rows: what is read, what is refused, errors, classification, choice, and the verb."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.accuracy.published import PublishedRow, Unreadable, read
from meshwright.planner.accuracy.score import JudgedRow, by_source, judge, quantile, score, spearman
from meshwright.spec.errors import DataError
from meshwright.verbs.main import main
from tests.planner.published_tables import COLUMNS, run, table, write

LAYOUTS = ({"tp": 1}, {"tp": 2}, {"tp": 4}, {"tp": 8}, {"pp": 2}, {"pp": 4}, {"tp": 2, "pp": 2})
KEYS = {"n", "step_time_mape", "step_time_median", "memory_mape", "memory_p95", "oom_accuracy", "false_fits",
        "rank_correlation", "regret"}  # fmt: skip


def predicted(rows: list[dict[str, str]], tmp_path: Path) -> list[JudgedRow]:
    judged = judge(read(write(tmp_path / "rows.csv", rows)))
    assert [entry.reason for entry in judged if isinstance(entry, Unreadable)] == []
    return [entry for entry in judged if isinstance(entry, JudgedRow)]


def measured(tmp_path: Path, *factors: float) -> list[dict[str, str]]:
    """Rows whose measured time is the predicted one times a factor."""
    rows = [run(**layout, step_time_s=1) for layout in LAYOUTS]
    times = [entry.step_s * factor for entry, factor in zip(predicted(rows, tmp_path), factors, strict=True)]
    return [run(**layout, step_time_s=f"{time:.9f}") for layout, time in zip(LAYOUTS, times, strict=True)]


def test_what_was_predicted_is_without_error(tmp_path: Path) -> None:
    scored = score(predicted(measured(tmp_path, *[1.0] * 7), tmp_path))
    assert scored.step_time_mape == pytest.approx(0, abs=1e-6)
    assert scored.rank_correlation == pytest.approx(1)
    assert (scored.regret, scored.oom_accuracy, scored.memory_mape, scored.n) == (pytest.approx(0), None, None, 7)


def test_errors_are_relative_to_what_was_measured(tmp_path: Path) -> None:
    scored = score(predicted(measured(tmp_path, 0.8, *[1.25] * 6), tmp_path))
    assert scored.step_time_mape == pytest.approx((0.25 + 6 * 0.2) / 7)
    assert scored.step_time_median == pytest.approx(0.2)


def test_regret_is_that_of_the_chosen_layout(tmp_path: Path) -> None:
    plain = predicted([run(**layout, step_time_s=1) for layout in LAYOUTS], tmp_path)
    fastest = min(range(7), key=lambda i: plain[i].step_s)
    factors = [100.0 if i == fastest else 1.0 for i in range(7)]
    scored = score(predicted(measured(tmp_path, *factors), tmp_path))
    best = min(entry.step_s for i, entry in enumerate(plain) if i != fastest)
    assert scored.regret == pytest.approx(100 * plain[fastest].step_s / best - 1)
    assert scored.rank_correlation is not None and scored.rank_correlation < 0.5


def test_fewer_than_five_layouts_are_no_grid(tmp_path: Path) -> None:
    scored = score(predicted(measured(tmp_path, *[1.0] * 7)[:4], tmp_path))
    assert (scored.rank_correlation, scored.regret) == (None, None)


def test_out_of_memory_is_classified(tmp_path: Path) -> None:
    huge = {"layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152}
    rows = [run(step_time_s=1), run(status="OOM Error"), run(**huge, status="OOM Error"), run(status="Other Error")]
    scored = score(predicted(rows, tmp_path))
    assert scored.oom_accuracy == pytest.approx(2 / 3)
    assert scored.false_fits == pytest.approx(1 / 2)
    assert scored.n == 4


def test_measured_peaks_are_compared(tmp_path: Path) -> None:
    [plain] = predicted([run(step_time_s=1, peak_mem_gb=1)], tmp_path)
    gib = plain.part_value / 2**30
    scored = score(predicted([run(step_time_s=1, peak_mem_gb=gib), run(step_time_s=1, peak_mem_gb=gib * 2)], tmp_path))
    assert scored.memory_mape == pytest.approx(0.25)
    assert scored.memory_p95 == pytest.approx(0.475)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dp": 3}, "contradicts itself"),
        ({"n_gpus": "many"}, "n_gpus='many' is no number"),
        ({"n_gpus": -8}, "no figure of a run"),
        ({"hidden": "", "model": "mystery"}, "neither in the row nor known"),
        ({"hidden": "", "model": "Nemotron_3_Nano"}, "state-space"),
        ({"gpu": "TPU v4"}, "no device"),
        ({"framework": "MaxText"}, "not known"),
        ({"micro_batch": "", "global_batch_seqs": ""}, "neither a global batch"),
        ({"pp": 8, "layers": 4}, "stages need a layer each"),
        ({"model": "gpt LoRA"}, "LoRA"),
        ({"step_time_s": ""}, "no time"),
        ({"micro_batch": 3}, "global_batch"),
        ({"heads": 0}, "heads"),
    ],
)
def test_what_cannot_be_scored_says_why(change: dict[str, object], reason: str, tmp_path: Path) -> None:
    [entry] = judge(read(write(tmp_path / "rows.csv", [run(**{"step_time_s": 1, **change})])))
    assert isinstance(entry, Unreadable)
    assert reason in entry.reason


def rows_of(tmp_path: Path, **columns: object) -> PublishedRow:
    [row] = read(write(tmp_path / "rows.csv", [run(**columns)]))
    assert isinstance(row, PublishedRow), row.reason
    return row


def test_a_named_model_has_the_shape_of_its_preset(tmp_path: Path) -> None:
    row = rows_of(tmp_path, model="LLAMA3_70B", hidden="", layers="", framework="NeMo/Megatron-Core", step_time_s=1)
    assert (row.plan.model.layers, row.plan.model.kv_heads, row.plan.model.vocab) == (80, 8, 128256)


def test_a_parameter_count_says_whether_the_ends_are_one_matrix(tmp_path: Path) -> None:
    sizes = {
        "model": "llama-x",
        "layers": 16,
        "hidden": 2048,
        "heads": 32,
        "ffn": 8192,
        "vocab": 131072,
        "step_time_s": 1,
    }
    assert rows_of(tmp_path, **sizes, params_b=1.342).plan.model.tied
    assert not rows_of(tmp_path, **sizes, params_b=1.61).plan.model.tied


def test_rates_become_step_times(tmp_path: Path) -> None:
    rate = rows_of(tmp_path, tok_s_gpu=16384)
    assert (rate.step_s, rate.derived) == (pytest.approx(64 * 1024 / 16384 / 8), False)
    flop = rows_of(tmp_path, framework="Megatron-LM 2021", tflops_gpu=100, recompute="full")
    hardware = 96 * 16 * 1024**2 * (1 + 1024 / (6 * 1024) + 51200 / (16 * 16 * 1024))
    assert (flop.step_s, flop.derived) == (pytest.approx(hardware * 64 * 1024 / 8 / 100e12), True)


def test_what_stands_between_the_lines_is_read(tmp_path: Path) -> None:
    llama3 = {"framework": "Meta in-house (FSDP)", "model": "llama3-405B", "hidden": "", "gpu": "H100-SXM-80",
              "n_gpus": 8192, "tp": 8, "pp": 16, "vpp": "~8 (126 layers)", "seq_len": 8192,
              "global_batch_seqs": 2048, "micro_batch": "", "zero_stage": "ZeRO-2-like FSDP",
              "tflops_gpu": 430}  # fmt: skip
    row = rows_of(tmp_path, **llama3)
    assert (row.plan.layout.vp, row.plan.model.layers, row.plan.layout.zero) == (8, 128, 2)
    hybrid = rows_of(tmp_path, framework="fms-fsdp", n_gpus=32, zero_stage="HSDP", gpu="A100-80 400Gbps", step_time_s=1)
    assert (hybrid.plan.layout.dp_shard, hybrid.plan.layout.dp_replicate, hybrid.plan.layout.zero) == (8, 4, 3)
    assert hybrid.plan.cluster.device.network_bytes_per_s == 400e9 / 8 / 8
    table_row = rows_of(
        tmp_path, framework="Megatron-Core 0.8", layers=92, pp=4, vpp="", schedule="interleaved 1f1b", step_time_s=1
    )
    assert table_row.plan.layout.vp == 23


def test_the_spearman_of_known_rows() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8207827)  # scipy.stats.spearmanr
    assert spearman([1, 1, 1], [1, 2, 3]) == 0


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert quantile([], 0.5) is None


def test_the_verb_prints_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        *measured(tmp_path, *[1.1] * 7),
        run(source="other", step_time_s=""),
        run(source="other", status="OOM Error"),
    ]
    path = write(tmp_path / "all.csv", rows)
    capsys.readouterr()
    assert main(["accuracy", str(path), str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"rows", "by_source", "calibration"}
    assert (document["rows"], document["calibration"], set(document["by_source"])) == (
        18,
        "zero-shot",
        {"made up", "other"},
    )
    assert all(set(entry) == KEYS for entry in document["by_source"].values())
    assert document["by_source"]["made up"]["step_time_mape"] == pytest.approx(1 - 1 / 1.1)
    assert document["by_source"]["other"]["step_time_mape"] is None
    assert document["by_source"]["other"]["false_fits"] == 1
    assert main(["accuracy", str(path)]) == 0
    assert "gives no time, rate or memory" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00", ",".join(COLUMNS).encode() + b"\n", None])
def test_bad_files_are_one_line_and_two(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    if content is not None:
        path.write_bytes(content)
    assert main(["accuracy", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.strip().splitlines()) == 1 and "bad.csv" in printed.err


NO_CALIBRATIONS = (
    "", "[]", '{"format": 2}', '{"format": 1, "clusters": {"x": {}}}',
    '{"format": 1, "clusters": {"x": {"changes": {"speeds.magic": {"times": 2}}}}}',
)  # fmt: skip


@pytest.mark.parametrize("content", NO_CALIBRATIONS)
def test_bad_calibrations_are_one_line_and_two(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "rows.csv", [run(step_time_s=1)])
    calibration = tmp_path / "bad.json"
    calibration.write_text(content)
    assert main(["accuracy", str(path), "--calibration", str(calibration)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_directory_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(read(tmp_path))


def test_a_peak_that_repeats_a_run_counts_once() -> None:
    runs, peaks = table("training_throughput.csv"), table("peak_memory.csv")
    both_tables = [row for row in read(runs) if "torchtitan" in row.source] + [
        r for r in read(peaks) if "T3" in r.source
    ]
    repeated = [entry for entry in judge(both_tables) if isinstance(entry, Unreadable) and "repeats" in entry.reason]
    assert len(repeated) == 3
    alone = judge(row for row in read(peaks) if "T3" in row.source)
    assert all(isinstance(entry, JudgedRow) for entry in alone)


def test_korthikantis_figures_are_parts_of_a_rank() -> None:
    judged = judge(row for row in read(table("peak_memory.csv")) if row.source.startswith("Korthikanti"))
    parts = [entry.row.part for entry in judged if isinstance(entry, JudgedRow)]
    assert {part: parts.count(part) for part in set(parts)} == {"activations": 8, "states": 4, "activation share": 20}


def test_no_published_row_is_left_out() -> None:
    path = table("training_throughput.csv")
    rows = list(read(path))
    with path.open(encoding="utf-8") as file:
        assert len(rows) == sum(1 for _ in file) - 1
    assert sum(len(of_source) for of_source in by_source(rows_as_judged(rows)).values()) == len(rows)
    assert sum(isinstance(row, Unreadable) for row in rows) < 0.05 * len(rows)


def rows_as_judged(rows: list[PublishedRow | Unreadable]) -> list[JudgedRow | Unreadable]:
    """Without predictions, which would take seconds."""
    return [
        JudgedRow(row=row, step_s=1, part_value=1, fits=True, seen=False) if isinstance(row, PublishedRow) else row
        for row in rows
    ]


def test_a_seen_row_counts_in_no_error(tmp_path: Path) -> None:
    judged = predicted(measured(tmp_path, 5.0, *[1.0] * 6), tmp_path)
    assert score([replace(judged[0], seen=True), *judged[1:]]).step_time_mape == pytest.approx(0, abs=1e-6)
