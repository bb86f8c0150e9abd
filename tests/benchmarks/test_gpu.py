"""The benchmark for GPUs, run on a CPU: what it measures, how it judges, what it leaves out, what it writes."""

import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from packaging.version import Version

from benchmarks import kernel_errors
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import hardware, kernel_rows, liger, timing, whole_steps
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.case import Case, Count, Leaf, inputs
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.engine_steps import ENGINE_STEPS
from benchmarks.gpu.entries import ENTRIES, MODEST, TINY
from benchmarks.gpu.errors import judged
from benchmarks.gpu.page import page
from meshwright.kernels.chooser import RULES

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
HERE = ["--device", "cpu", "--tiny"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of everything but what compiles, and its page."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        assert program.main([*HERE, "--out", str(out), "--skip", "transformers"]) == 0
    first = next(out.glob("gpu_cpu_*.json"))
    return json.loads(first.read_text()), first.with_suffix(".md").read_text()


def test_every_operation_is_measured_in_every_pass(run: Any) -> None:
    actual, _ = run
    assert len(actual["kernels"]) == len(TINY) and not actual["left_out"] and not actual["broken"]
    for row in actual["kernels"]:
        for name, entry in row["contestants"].items():
            assert "failed" not in entry, (row["operation"], name, entry)
            assert set(entry["seconds"]) == set(row["floor_seconds"]) == set(entry["roofline"])
            for spread in entry["seconds"].values():
                assert 0 < spread["low"] <= spread["median"] <= spread["high"]
            assert entry["rounds"] >= timing.LEAST_ROUNDS
        ours = {name: contestant for name, contestant in row["contestants"].items() if name.startswith("ours")}
        assert all(our_part["judged"]["holds"] for our_part in ours.values()), row["operation"]
    names = {name for row in actual["kernels"] for name in row["contestants"]}
    assert {"ours, torch", "eager", "compiled", "torch"} <= names


def test_a_step_is_a_row_with_its_rates(run: Any) -> None:
    actual, text = run
    (row,) = actual["steps"]
    entry = row["contestants"]["ours"]
    assert entry["tokens_per_s"] == pytest.approx(64 / entry["seconds"]["median"])
    assert 0 < entry["mfu"]["measured"]["half"] < entry["mfu"]["measured"]["full"]
    assert (row["layers"], row["of_layers"]) == (2, 2) or row["layers"] == row["of_layers"]
    assert "| ours, compiled |" in text


@pytest.mark.parametrize("part", program.PARTS)
def test_a_part_fits_into_nine_minutes(part: str) -> None:
    """By what rows are thought to take, which a run then corrects; every row is of one part."""
    rows = program.rows_of(part, tiny=False)
    assert rows and sum(map(program.expected_s, rows)) <= 60 * program.PART_MINUTES
    assert len({entry.name for entry in rows}) == len(rows), "a row has a name of its own"
    listed = {type(entry) for entry in program.rows_of(part, tiny=True)}
    assert listed == {type(entry) for entry in rows}, "the tests run each kind"


def test_parts_of_a_day_make_one_page(tmp_path: Path) -> None:
    """Serving and steps of the engine: each run leaves what the other wrote, and takes the place of its own rows."""
    for part in ("steps", "serve", "quantized", "serve"):
        assert program.main([*HERE, "--part", part, "--out", str(tmp_path), "--only", "engine,serving"]) == 0
    (location,) = tmp_path.glob("*.json")
    document = json.loads(location.read_text())
    assert [row["words"] for row in document["engine_steps"]] == ["compile=off, precision=fp32, 2 documents a row"]
    assert sorted(row["scheme"] for row in document["serving"]) == ["", "int4-rtn"] and not document["broken"]
    loads = {title: load for row in document["serving"] for title, load in row["loads"].items()}
    assert {"2 x 8 + 4", "3 x 4 to 8, in and out", "1 x 8 + 4"} == loads.keys()
    assert loads["2 x 8 + 4"]["tokens"] == 8 and all(load["tokens_per_s"] > 0 for load in loads.values())
    text = location.with_suffix(".md").read_text()
    for title in ("## Steps of the engine", "### llama-tiny, int4-rtn (graphs", "| 2 x 8 + 4 |"):
        assert title in text
    assert document["minutes"] == 4 * program.PART_MINUTES
    other = {**document, "machine": {**document["machine"], "commit": "another"}}
    assert program.merged(other, document) == document, "of another commit nothing is taken over"


def test_a_bare_machine_needs_few_packages() -> None:
    """Those that docs/benchmarks/README.md names, and what they and torch bring."""
    code = (
        "import sys, benchmarks.gpu.__main__; names = {name.partition('.')[0] for name in sys.modules};"
        "print(*sorted(names - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    known = {"numpy", "safetensors", "tokenizers", "yaml", "jinja2", "markupsafe", "torch", "triton", "meshwright"}
    brought = {"benchmarks", "mpmath", "sympy", "tqdm", "typing_extensions", "torchgen", "huggingface_hub"}
    brought |= {"zstandard"}  # torch imports it where it is installed
    actual = {name for name in done.stdout.split() if not name.startswith(("_", "cython"))}
    assert actual <= known | brought, actual - known - brought


def test_a_load_over_http_beside_the_engine(tmp_path: Path) -> None:
    """The real server, in two processes, with streaming clients in a third: each stream states all of its tokens."""
    assert program.main([*HERE, "--part", "http", "--out", str(tmp_path)]) == 0
    (location,) = tmp_path.glob("*.json")
    document = json.loads(location.read_text())
    (row,) = document["http"]
    assert not document["broken"] and row["load"] == "4 x 8 + 24"
    assert row["http"]["tokens"] == row["engine"]["tokens"] == 4 * 24
    assert row["http"]["whole_tokens_per_second"] == pytest.approx(96 / row["http"]["seconds"])
    assert row["share_of_engine"] == row["http"]["whole_tokens_per_second"] / row["engine"]["tokens_per_s"] > 0
    assert "| llama-tiny | 4 x 8 + 24 |" in location.with_suffix(".md").read_text()


def test_the_measured_steps_of_a_gpu_are_rows() -> None:
    """Those of docs/benchmarks/README.md: a later run can be held against them."""
    names = " / ".join(entry.name for entry in ENGINE_STEPS)
    for part in ("llama-3.1-8b, 4 x 4,096 x 2", "gpt2-124m, 64 x 1,024 x 1, vocab=50304", "tf32=True",
                 "qwen2.5-7b, 4 x 1,024 x 8", "8 documents", "products=fp8", "recompute=full"):  # fmt: skip
        assert part in names
    for entry in ENGINE_STEPS:
        plan = entry.plan(CPU)
        plan.check()
        assert plan.micro_batches == entry.accumulation


def test_the_page_follows_from_the_document_alone(run: Any) -> None:
    actual, text = run
    assert page(json.loads(json.dumps(actual))) == text
    for row in actual["kernels"]:
        assert f"### {row['operation']}, {row['size']}" in text
    assert "Triton's kernels: a CPU" in text and "by --skip: transformers" in text
    assert actual["command"] in text and actual["machine"]["versions"]["torch"] in text


def test_a_page_can_be_written_again(tmp_path: Path, run: Any) -> None:
    location = tmp_path / "gpu_x_2026-01-01.json"
    location.write_text(json.dumps(run[0]))
    assert program.main(["--page", str(location)]) == 0
    assert location.with_suffix(".md").read_text() == run[1]


def test_without_a_gpu_one_sentence_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert program.main([]) == 2
    assert capsys.readouterr().err == "benchmarks.gpu: no CUDA device here, and nothing to measure without one.\n"


def test_toy_figures_are_not_written_unasked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = set(program.PAGES.glob("*"))
    assert program.main([*HERE, "--only", "gelu", "--skip", "compiled"]) == 0
    assert "### GELU" in capsys.readouterr().out
    assert set(program.PAGES.glob("*")) == before


def test_what_there_is_no_time_for_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([*HERE, "--minutes", "0", "--only", "rms norm,step"]) == 0
    text = capsys.readouterr().out
    assert "- rms norm 7 x 40: no time left in 0 minutes" in text
    assert "- step of llama-tiny, 2 x 32: no time left in 0 minutes" in text and "### " not in text


def test_the_budget_learns_what_rows_take() -> None:
    now = [0.0]
    budget = Budget(1.0, lambda: now[0])
    assert budget.has("kernel", "a", 20)
    now[0] = 40.0
    budget.took("kernel", 20, 40.0)
    assert not budget.has("kernel", "b", 15) and budget.has("step", "c", 15) and budget.has("kernel", "d", 9)
    assert budget.left_out == ["b"] and not budget.late()
    now[0] = 61.0
    assert budget.late()


def test_contestants_that_come_late_are_named() -> None:
    (entry,) = (entry for entry in TINY if entry.name.startswith("gelu"))
    case, timer = entry.case(torch.float32, CPU), timing.HostTimer()
    asked = iter((False, True))
    sets = timing.input_sets(case, CPU, 0)
    figures = timing.measured(case, {"one": case.eager, "two": case.eager}, sets, timer, 0.0, lambda: next(asked))
    assert "seconds" in figures["one"] and figures["two"] == {"left_out": "no time left"}


def broken(*_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such kernel\nand more")


def test_a_contestant_that_fails_says_why_and_the_others_run_on() -> None:
    entry = TINY[1]
    case = entry.case(torch.bfloat16, CPU)
    sets, runs = timing.input_sets(case, CPU, 0), {"bad": broken, "good": case.eager}
    figures = timing.measured(case, runs, sets, timing.HostTimer(), 0.0, lambda: False)
    assert figures["bad"] == {"failed": "RuntimeError: no such kernel"} and figures["good"]["seconds"]
    assert judged(case, {"bad": broken}, CPU)["contestants"]["bad"] == {"failed": "RuntimeError: no such kernel"}


def test_a_kernel_that_is_less_exact_is_seen() -> None:
    case = next(entry for entry in TINY if entry.name.startswith("gated")).case(torch.bfloat16, CPU)

    def rough(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate * 1.01) * up

    actual = judged(case, {"rough": rough, "right": case.eager}, CPU)["contestants"]
    assert not actual["rough"]["holds"] and actual["rough"]["ratios"]["rows"] > 2
    assert actual["right"]["holds"] and actual["right"]["ratios"]["rows"] == 1.0


def test_inputs_are_more_than_a_cache_holds() -> None:
    case = TINY[1].case(torch.bfloat16, CPU)
    each = inputs(case, CPU).bytes_held
    sets = timing.input_sets(case, CPU, 3 * each)
    assert len(sets) * each > timing.CACHES * 3 * each
    assert not torch.equal(sets[0].leaves[0], sets[1].leaves[0])
    assert len(timing.input_sets(case, CPU, 10**9)) == timing.MOST_SETS


def test_the_roofline_is_the_longer_of_bytes_and_flop() -> None:
    ceilings = Ceilings(1e9, {"bf16": 1e12, "fp32": 1e11})
    case = Case(
        operation="x", size="1", dtype=torch.bfloat16, leaves=(Leaf((1,)),), exact=broken, eager=broken, ours={},
        chosen="", counts={"forward": Count(2e9), "backward": Count(1e9, 5e12)}, kinds=(),
    )  # fmt: skip
    assert kernel_rows.floors(case, ceilings) == {"forward": 2.0, "backward": 5.0, "full": 7.0}


def test_every_kernel_of_ours_has_an_entry() -> None:
    """Counted by the chooser's operations, at the sizes of the table and of the tests; and the products of 8 bits."""
    builders = {
        "loss_rows": "head and loss", "rms_norm": "rms norm", "add_rms_norm": "add rms norm", "swiglu": "gated",
        "rope": "rotary", "merge": "merge", "permute": "permute", "grouped": "grouped product",
        "layer_norm": "layer norm", "gelu": "gelu", "attention": "causal", "narrow_adamw": "int8 update",
        "restore": "restored", "packed_product": "int4 linear", "int8_product": "int8 linear",
        "paged_attention": "paged rows", "adamw": "fp32 update", "square_sums": "gradient norm",
        "rotate_and_store": "turned and kept", "likeliest": "likeliest token", "narrow": "weight gradient fp8",
    }  # fmt: skip
    assert set(builders) == set(RULES)
    others = "bf16 update", "weight gradient fp8", "grouped fp8", "nf4 linear", "fp8 linear"
    for part in (ENTRIES, TINY, MODEST):
        assert all(any(entry.name.startswith(name) for entry in part) for name in (*builders.values(), *others))


def test_counts_of_bytes_and_flop() -> None:
    by_name = {entry.name: entry for entry in TINY}
    norm = by_name["rms norm 7 x 40"].case(torch.bfloat16, CPU)
    assert norm.counts["forward"].bytes_moved == 2 * 7 * 40 * 2
    loss = by_name["head and loss 21 x 16 x 50"].case(torch.bfloat16, CPU)
    assert sum(count.flop for count in loss.counts.values()) == 6 * 21 * 16 * 50
    attention = by_name["causal 37 x 4 x 2 x 16"].case(torch.bfloat16, CPU)
    assert attention.counts["forward"].flop == 4 * 4 * 16 * (37 * 38 / 2)
    documents = by_name["documents 40 x 3 x 4 x 2 x 16"].case(torch.bfloat16, CPU)
    assert documents.counts["forward"].flop < 4 * 4 * 16 * (40 * 41 / 2)


def test_names_of_hardware() -> None:
    assert hardware.normalised("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"
    assert hardware.normalised("NVIDIA GeForce RTX 4090 Laptop GPU") == "rtx-4090-laptop"


def test_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "580.65, 700.00, 700.00, 1755, 1980, 2619, 54\n"
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=message, stderr="")
    )
    assert hardware.smi("0")["driver"] == "580.65" and hardware.smi("0")["sm_clock_mhz"] == "1755"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout="", stderr=""))
    assert hardware.smi("0") == {}


class FakeEvent:
    """Counts milliseconds by records."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now += 2.0
        self.at = FakeEvent.now

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at - self.at


def test_the_clock_of_a_gpu_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    held = iter((100, 130))
    for name, value in {
        "Event": FakeEvent, "synchronize": lambda device=None: None, "_sleep": waited.append,
        "get_device_properties": lambda device: type("P", (), {"L2_cache_size": 1000})(),
        "reset_peak_memory_stats": lambda device: None, "memory_allocated": lambda device: next(held),
        "max_memory_allocated": lambda device: 175,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    timer = timing.DeviceTimer(CPU)
    case = TINY[1].case(torch.bfloat16, CPU)
    sets = timing.input_sets(case, CPU, 0)
    assert timer.peak_bytes(lambda: None) == 75 and timer.cache_bytes == 1000
    marks = timing.once(case.eager, sets[0], timer, True, 0.001)
    assert {part: timer.seconds(*ends) for part, ends in marks.items()} == {
        "forward": 0.002, "backward": 0.002, "full": 0.004,
    }  # fmt: skip
    assert waited == [int(0.001 * timing.CYCLES_PER_S)]


class FakeLiger:
    """Its signatures, computed by plain code."""

    @staticmethod
    def liger_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, in_place: bool) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def liger_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        def turned(x: torch.Tensor) -> torch.Tensor:
            left, right = x.chunk(2, -1)
            return (x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]).to(x.dtype)

        return turned(q), turned(k)

    @staticmethod
    def liger_fused_linear_cross_entropy(
        x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, reduction: str
    ) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((x @ weight.T).float(), targets, reduction=reduction)


def test_liger_takes_part_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert liger.offered("rms_norm", eps=1e-5) == {} or liger.functional() is not None
    monkeypatch.setattr(liger, "functional", lambda: FakeLiger)
    for name in ("rms norm", "rotary", "head and loss"):
        case = next(entry for entry in TINY if entry.name.startswith(name)).case(torch.float32, CPU)
        actual = judged(case, case.rivals, CPU)["contestants"]["Liger"]
        assert max(actual["errors"]) < 1e-5, name
    assert liger.offered("add_rms_norm", eps=1e-5) == {}, "this version has none"


def test_all_contestants_of_a_step_train(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    (entry,) = whole_steps.TINY_STEPS
    shape = whole_steps.fitting(entry, CPU, "fp32")
    makers = whole_steps.makers(shape, entry, CPU, "fp32", {"liger", "ours, compiled"})
    assert list(makers) == ["ours", "transformers", "transformers, compiled"]
    for name, make in makers.items():
        step = make()
        losses = [float(step()) for _ in range(4)]
        assert losses[-1] < losses[0], name
    assert whole_steps.timed(lambda: broken, timing.HostTimer(), 0.1) == {"failed": "RuntimeError: no such kernel"}


def test_liger_stays_out_of_the_next_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes transformers' module and class: what comes behind it would be measured with its kernels."""
    pytest.importorskip("transformers")
    name, calls = "transformers.models.llama.modeling_llama", list[str]()

    def apply() -> None:
        module = importlib.import_module(name)
        plain = module.LlamaForCausalLM.forward

        def forward(*arguments: Any, **named: Any) -> Any:
            calls.append("Liger")
            return plain(*arguments, **named)

        module.LlamaForCausalLM.forward = forward
        module.apply_rotary_pos_emb = partial(module.apply_rotary_pos_emb)

    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace(apply_liger_kernel_to_llama=apply))
    (entry,) = whole_steps.TINY_STEPS
    shape = whole_steps.fitting(entry, CPU, "fp32")
    whole_steps.theirs(shape, entry, CPU, "fp32", "liger")()
    assert calls == ["Liger"]
    whole_steps.theirs(shape, entry, CPU, "fp32", "eager")()
    assert calls == ["Liger"] and not isinstance(sys.modules[name].apply_rotary_pos_emb, partial)


def test_a_model_is_cut_to_the_memory_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB hold 1B as it is and a part of 8B's layers."""
    gpu, room = torch.device("cuda", 0), 80 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (room, room))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("P", (), {"name": "X", "total_memory": room})()
    )
    monkeypatch.setattr(whole_steps.machine, "title", lambda device: "X")
    one_billion, small, eight = (whole_steps.fitting(entry, gpu, "bf16") for entry in whole_steps.STEPS)
    assert small.layers == 12
    assert one_billion.layers == 16 and 4 <= eight.layers < 32
    plan = whole_steps.plan_of(one_billion, whole_steps.STEPS[0], gpu, how="ours", precision="bf16")
    assert 16 * 1.2e9 < whole_steps.predicted_bytes(plan) < whole_steps.predict(plan).peak_bytes


def test_errors_of_fast_paths_hold_their_bars() -> None:
    summary = kernel_errors.summed_up(kernel_errors.here(True, CPU))
    assert summary["missed"] == 0, summary["missing"]
    assert summary["checked"] > 40 and summary["largest"]["rows"] > 0.5
    assert "above the bar" not in "\n".join(kernel_errors.table(summary))


def test_a_missed_bar_is_counted() -> None:
    row = {
        "operation": "x", "dtype": "bf16", "by": "ours", "how": "device", "errors": [0.1], "ratios": {"rows": 2.0},
        "holds": False,
    }  # fmt: skip
    summary = kernel_errors.summed_up([row])
    assert summary["missed"] == 1 and summary["largest"]["rows"] == 2.0
    assert "2.000 (rows) **above the bar**" in "\n".join(kernel_errors.table(summary))


def _interpreter() -> None:
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"):
        pytest.skip("this Triton's interpreter is older than this numpy")


@pytest.mark.slow
def test_triton_contestants_in_the_interpreter_hold_their_bars() -> None:
    _interpreter()
    actual = kernel_errors.interpreted()
    every = {entry.case(torch.float16, CPU).operation for entry in TINY if "fp8" not in entry.name}
    assert {row["operation"] for row in actual} == every, "products of 8 bits are torch's"
    assert all(row["holds"] for row in actual), [row for row in actual if not row["holds"]]


@pytest.mark.long
def test_triton_contestants_are_timed_in_the_interpreter(tmp_path: Path) -> None:
    _interpreter()
    words = [
        *HERE,
        "--dtype",
        "fp16",
        "--only",
        "rms norm 7,loss 9,merge",
        "--skip",
        "compiled",
        "--out",
        str(tmp_path),
    ]
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", *words], cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-2000:]
    document = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert len(document["kernels"]) == 3
    for row in document["kernels"]:
        entry = row["contestants"]["ours, Triton"]
        assert entry["seconds"]["forward"]["median"] > 0 and entry["judged"]["holds"], row["operation"]
