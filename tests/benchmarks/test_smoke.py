"""Every benchmark runs at toy size and reports the keys that the claims read."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks import (
    agreement,
    dry_qlora,
    exactness,
    muon,
    optimizer_states,
    quickstart,
    recomputation,
    resident,
    resume,
    serve,
    serve_adapters,
    serve_forms,
    serve_http,
    serve_operations,
    serve_quality,
    serve_quantized,
    serve_speed,
    startup,
)
from meshwright import planfile
from meshwright.kernels.c import sequence_attention, training_rows
from meshwright.spec.layout.layout import RECOMPUTE
from meshwright.spec.weights.inventory import token_flop
from tests.verbs.toy import write_texts

TOY = [
    "model.layers=1",
    "model.hidden=48",
    "model.ffn=64",
    "recipe.steps=2",
    "recipe.warmup_steps=0",
    "recipe.sequence=32",
    "recipe.eval_sequences=2",
]


@pytest.mark.long
def test_a_card_of_24_gb_is_compared() -> None:
    figures = dry_qlora.compared("qwen2.5-0.5b", "rtx4090x1")
    assert 0 < figures["peak_bytes"] < figures["usable_bytes"] and figures["error"] < 0.05


def test_startup_tells_time_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "VERBS", {"version": ("--version",)})
    figures = startup.measure(1)
    assert figures["verbs_with_torch"] == 0
    assert 0 < figures["slowest_seconds"] < 60


def test_startup_would_notice_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "PROBE", "import torch\n" + startup.PROBE)
    assert startup.loads_torch(("--version",), tmp_path)


def test_agreement_in_both_directions(tmp_path: Path) -> None:
    with torch.no_grad():
        assert agreement.imported_error("llama", tmp_path / "in") < 1e-5
        assert agreement.exported_error("llama", tmp_path / "out") < 1e-5


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory of other processes is read in /proc")
def test_children_are_counted_and_shared_pages_once() -> None:
    hold = "import time; held = bytearray(64 * 2**20); time.sleep(0.6)"
    alone = resident.watch([sys.executable, "-c", hold])
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    family = resident.watch([sys.executable, "-c", parent])
    assert 64 * 2**20 < alone.peak_bytes < 128 * 2**20
    assert family.peak_bytes > 64 * 2**20
    assert resident.watch([sys.executable, "-c", "print(1); raise SystemExit(3)"]).status == 3


@pytest.mark.slow
def test_quickstart_reports_what_the_claims_read() -> None:
    figures = quickstart.measure([*TOY, "data.limit_bytes=100000"])
    assert figures["seconds"] > 0
    assert 0 < figures["bits_per_byte"] < 20
    assert isinstance(figures["sample"], str)


@pytest.mark.parametrize("name", exactness.SHAPES)
def test_a_step_is_exact_however_it_is_cut_or_recomputed(name: str) -> None:
    shape = exactness.SHAPES[name]
    plain = exactness.step(shape, exactness.ROWS, "none")
    for policy in exactness.AGAIN:
        again = exactness.step(shape, exactness.ROWS, policy)
        assert not [key for key in plain if not torch.equal(plain[key], again[key])]
    assert exactness.relative_difference(plain, exactness.step(shape, 1, "none")) <= 1e-6


@pytest.mark.skipif(not training_rows.is_compiled(), reason="no C compiler that takes the loops of kernels/c")
def test_a_long_step_attends_in_loops_and_keeps_every_bit_when_made_again() -> None:
    shape = exactness.SHAPES["long"]
    with patch.object(sequence_attention, "gradients", wraps=sequence_attention.gradients) as gradients:
        once, again = (exactness.step(shape, exactness.ROWS, "none") for _ in range(2))
    assert gradients.call_count == 2 * shape.layers
    assert not [key for key in once if not torch.equal(once[key], again[key])]


def test_exactness_would_notice_a_mean_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = exactness.SHAPES["dense"]
    plain = exactness.step(shape, exactness.ROWS, "none")
    monkeypatch.setattr(exactness, "ROWS", exactness.ROWS - 1)
    assert exactness.relative_difference(plain, exactness.step(shape, 1, "none")) > 1e-3


@pytest.mark.slow
def test_a_killed_run_ends_as_the_run_that_was_not() -> None:
    figures = resume.measure(kills=1, steps=8, seed=0)
    assert (figures["differing_tensors"], figures["differing_records"]) == (0, 0)
    assert figures["tensors"] > 50 and figures["records"] >= 8


@pytest.mark.long
def test_recomputation_is_measured_beside_what_is_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recomputation.SIZES, "10m", (1, 64))
    figures = recomputation.compared("10m", 1)
    policies = figures["policies"]
    assert list(policies) == [*RECOMPUTE, recomputation.HALF]
    assert policies["full"]["bytes"] < policies[recomputation.HALF]["bytes"] < policies["none"]["bytes"]
    assert figures["largest_dry_error"] < 0.2
    assert policies["full"]["flop_ratio"] > policies[recomputation.HALF]["flop_ratio"] > 1


@pytest.mark.long
def test_a_curve_of_muon_is_held_against_adamws(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("fp32, adamw", "fp32, muon")
    monkeypatch.setattr(muon, "VARIANTS", {name: muon.VARIANTS[name] for name in names})
    figures = muon.measured(6)
    entry = figures["curves"][names[1]]
    assert len(entry["losses"]) == 6 and entry["off"] == figures["largest_off"] != 0
    assert entry["bytes"] < figures["curves"][names[0]]["bytes"]


def test_curves_of_narrow_states_are_held_against_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("fp32", "fp32, int8 states")
    monkeypatch.setattr(optimizer_states, "VARIANTS", {name: optimizer_states.VARIANTS[name] for name in names})
    figures = optimizer_states.measured(3)
    narrow = figures["curves"][names[1]]
    assert len(narrow["losses"]) == 3 and 0 < abs(narrow["off"]) == figures["largest_off"] < 0.01
    assert narrow["bytes"] < 6.2 < figures["curves"]["fp32"]["bytes"] == 12


@pytest.mark.slow
def test_serving_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")
    monkeypatch.setattr(serve_speed, "REQUESTS", 3)
    monkeypatch.setattr(serve_speed, "BATCH", 2)
    threads = torch.get_num_threads()
    try:
        for part in serve_speed.PARTS:
            serve_speed.main(["--json", "--rounds", "1", "--part", part])
    finally:
        torch.set_num_threads(threads)
    actual: dict[str, float] = {}
    for line in capsys.readouterr().out.splitlines():
        actual |= json.loads(line) if line.startswith("{") else {}
    assert actual["wrong"] == 0 and actual["prefix_hit_tokens"] == 1024
    for name in ("over_one_by_one", "over_static", "exact_costs", "blocks_100k_over_1k", "scheduler_step_microseconds"):
        assert actual[name] > -1


@pytest.mark.slow
def test_throughput_over_quality(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two designs in two steps: equal tokens by both implementations, a quality for each form, and a picture."""
    pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")
    for name, value in (("ANSWER", 4), ("REQUESTS", 2), ("SCORED", 2)):
        monkeypatch.setattr(serve_quality, name, value)
    small = {name: {**shape, "layers": 1} for name, shape in serve_quality.DESIGNS.items()}
    monkeypatch.setattr(serve_quality, "DESIGNS", small)
    texts = write_texts(tmp_path / "texts")
    monkeypatch.setattr(serve_quality, "TEXT", str(texts))
    figures = serve_quality.measure(tmp_path, 2, 1, ("GQA", "MLA"))
    assert not figures["left_out"] and min(figures["equal_tokens"].values()) == 1
    assert {row["what"] for row in figures["rows"]} >= {"transformers", "engine", "eager attention", "paged, int4"}
    assert all(row["tokens_per_second"] > 0 and 0 < row["bits_per_byte"] < 10 for row in figures["rows"])
    serve_quality.draw(figures, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_designs_have_equal_compute() -> None:
    shapes = [planfile.read(None, [f"model={json.dumps(entry)}"]).model for entry in serve_quality.DESIGNS.values()]
    flop = [token_flop(shape, 128, causal=True).forward for shape in shapes]
    assert max(flop) < 1.03 * min(flop)


def test_all_serving_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    """One of them, in a process of its own; and what is installed."""
    assert serve.main(["--only", "operations", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["operations"]["faults"] == 0 and "vllm" in document["installed"]
    with pytest.raises(SystemExit):
        serve.main(["--only", "nothing"])


def test_serving_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_http.main(["--json", "--clients", "2", "--seconds", "1"]) == 0
    (actual,) = json.loads(capsys.readouterr().out).values()
    assert actual["clients"] == 2 and 0 < actual["share_of_engine"] < 1.1 and actual["gap_p99_steps"] > 0.5
    assert actual["messages_per_step"] < 1.1 and actual["client_core_share"] < 1
    assert serve.flat({"a": {"b": 1}, "c": 2}) == {"a.b": 1, "c": 2}


def test_serving_quantized(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")
    monkeypatch.setattr(serve_quantized, "SHAPE", replace(serve_quantized.SHAPE, layers=1, vocab=2048))
    threads = torch.get_num_threads()
    try:
        serve_quantized.main(["--json", "--rounds", "1", "--new", "2"])
    finally:
        torch.set_num_threads(threads)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    for batch in serve_quantized.BATCHES:
        assert document[f"int8_over_hf_{batch}"] and document[f"engine_{batch}_tokens_per_second"] > 0
    assert 0.5 < document["top1"] <= 1


@pytest.mark.long
def test_products_take_a_share_of_a_step() -> None:
    # In a process of its own: the operators that the module names must be there without any other benchmark's imports.
    script = """
import json
from benchmarks import product_share
product_share.batch_of = lambda shape, precision: (1, 32)
print(json.dumps(product_share.share("10m", "fp32", 1)))
"""
    root = Path(__file__).resolve().parent.parent.parent
    finished = subprocess.run([sys.executable, "-c", script], cwd=root, check=True, capture_output=True, text=True)
    figures = json.loads(finished.stdout)
    assert figures["calls"] > 0 and figures["tokens"] == 32 and figures["share"] > 0


@pytest.mark.long
def test_serving_forms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve_forms, "WINDOWS", 2)
    monkeypatch.setattr(serve_forms, "NEW", 12)
    monkeypatch.setattr(serve_forms, "LEARNER", {**serve_forms.LEARNER, "layers": 1})
    threads = torch.get_num_threads()
    try:
        serve_forms.main(["--json", "--rounds", "1", "--steps", "12"])
    finally:
        torch.set_num_threads(threads)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < document["int8_kl"] < document["fp8_kl"] and document["differing"] == 0
    assert document["guessed_over_plain_1"] > 0 and 0 <= document["accepted_8"] <= 1


def test_serving_adapters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve_adapters, "SHAPE", replace(serve_adapters.SHAPE, layers=1, vocab=512))
    monkeypatch.setattr(serve_adapters, "NEW", 3)
    threads = torch.get_num_threads()
    try:
        serve_adapters.main(["--json", "--rounds", "1"])
    finally:
        torch.set_num_threads(threads)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["differing"] == 0 and document["base_over_16"] > 0 and document["adapters_over_models"] > 0


def test_serving_operations(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["serve_operations", "--json", "--operations", "300"])
    serve_operations.main()
    assert json.loads(capsys.readouterr().out)["faults"] == 0
