"""Every feature that compiles gives whole blocks as graphs, with one device's values and the bytes of eager code."""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.compat import torch_compile
from meshwright.kernels.linear import cpu_product
from meshwright.kernels.linear.weight_gradients import WeightGradients, splitting
from meshwright.model import Transformer, build
from meshwright.observe.oracle.feature_matrix import CASE, DENSE
from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import BANDS, ZERO, Case, RankOutcome, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import make_mesh, on_one_device
from meshwright.parallel.blocks.compiling import VARIANTS, compile_notes, is_compiled, resolve_auto
from meshwright.parallel.groups.group import Traffic
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.schedule import SPLIT
from meshwright.spec.model.shape import LoRAShape
from tests.model.shrunk import KINDS, model, tokens

NARROW = replace(shrink("llama-3.1-8b"), hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=64)
"""Matrices of multiples of 16 on two tp ranks."""
CASES = {
    "dense": DENSE,
    "packed": replace(DENSE, packed=True),
    "routed": CASE,
    "shared": replace(CASE, shape=shrink("deepseek-v3"), steps=1),
    "fp8": replace(DENSE, shape=NARROW, precision="bf16", products="fp8"),
}
BACKEND = "aot_eager_decomp_partition"
"""Traces and cuts as the default one does, and generates no code."""
CUDA = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Compiled:
    """Of one rank: what it trained, how many graphs were made, why any was cut, what it sent in which order, what it
    left for later."""

    outcome: RankOutcome
    graphs: int
    breaks: tuple[str, ...]
    calls: tuple[tuple[str, str, int], ...]
    left: tuple[int, ...]
    """Products that each W makes."""


def trained(case: str, options: dict[str, Any], backend: str, process_groups: ProcessGroups) -> Compiled:
    """On one rank: the steps of a case."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    calls: list[tuple[str, str, int]] = []
    left: list[int] = []
    whole, tell, run = torch.compile, Traffic.tell, WeightGradients.run

    def remember(self: Traffic, axis: str, collective: str, sent_bytes: int) -> None:
        calls.append((axis, collective, sent_bytes))
        tell(self, axis, collective, sent_bytes)

    def count(self: WeightGradients) -> None:
        left.append(len(self))
        run(self)

    torch.compile, Traffic.tell = partial(whole, backend=backend), remember  # type: ignore[method-assign]
    WeightGradients.run = count  # type: ignore[method-assign]
    try:
        result = outcome(CASES[case], Layout(**{"compile": "on", **options}), process_groups=process_groups)
    finally:
        torch.compile, Traffic.tell, WeightGradients.run = whole, tell, run  # type: ignore[method-assign]
    breaks = tuple(counters["graph_break"])
    return Compiled(result, counters["stats"]["unique_graphs"], breaks, tuple(calls), tuple(left))


def all_trained(case: str, layouts: list[dict[str, Any]], backend: str) -> list[Compiled]:
    """On one rank: layouts of one world size, compiled and then not."""
    process_groups: ProcessGroups = {}
    both = [{**options, "compile": compiled} for options in layouts for compiled in ("on", "off")]
    return [trained(case, options, backend, process_groups) for options in both]


POLICIES = ("none", "selective", "all-but-attention", "full")
LAYOUTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "data": ("dense", [{"dp_shard": 2, "zero": zero} for zero in (0, 1, 2, 3)]),
    "pipelines": ("dense", [{"pp": 2, "micro_batch": 1, "schedule": name} for name in ("afab", "1f1b")]),
    "split": ("dense", [{"pp": 2, "micro_batch": 1, "schedule": "zb-h1", "recompute": p} for p in POLICIES]),
    "in a V": ("dense", [{"pp": 2, "vp": 2, "micro_batch": 1, "schedule": name} for name in ("zb-v", "dualpipe-v")]),
    "split in fp8": ("fp8", [{"pp": 2, "micro_batch": 1, "schedule": "zb-h1"}]),
    "tp": ("dense", [{"tp": 2, "recompute": policy} for policy in POLICIES]),
    "tp + sp": ("dense", [{"tp": 2, "sp": True, "recompute": policy} for policy in POLICIES]),
    "tp in pieces": ("dense", [{"tp": 2, "tp_chunks": 2, "recompute": policy} for policy in POLICIES]),
    "tp + sp in pieces": ("dense", [{"tp": 2, "sp": True, "tp_chunks": 2, "recompute": p} for p in POLICIES]),
    "tp in fp8": (
        "fp8",
        [
            {"tp": 2, "tp_chunks": 2},
            {"tp": 2, "sp": True, "tp_chunks": 2},
            {"tp": 2, "sp": True, "recompute": "selective"},
        ],
    ),
    "cp ring": ("dense", [{"cp": 2, "zero": 0, "context": "ring", "recompute": policy} for policy in POLICIES]),
    "cp gather": ("dense", [{"cp": 2, "zero": 0, "context": "all-gather", "recompute": p} for p in POLICIES]),
    "packed": (
        "packed",
        [
            {"tp": 2, "sp": True, "recompute": "selective"},
            {"cp": 2, "zero": 0, "context": "ring", "recompute": "full"},
            {"cp": 2, "zero": 0, "context": "all-gather"},
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_dense_block_is_one_graph(name: str) -> None:
    """0 graphs are a run that is eager without a word; a break is one under recomputation."""
    case, layouts = LAYOUTS[name]
    alone = outcome(CASES[case], Layout(compile="off"))
    runs = list(zip(*on_ranks(2, all_trained, case, layouts, BACKEND, limit_s=600), strict=True))
    for layout, compiled, eager in zip(layouts, runs[::2], runs[1::2], strict=True):
        band = BANDS["fp8" if case == "fp8" else "fp32"]
        assert first_difference(alone, [rank.outcome for rank in compiled], band) is None, layout
        kinds = 2 if layout.get("schedule") == "dualpipe-v" else 1  # some of its passes are split, others whole
        assert [(rank.graphs, rank.breaks) for rank in compiled] == [(kinds, ())] * 2, layout
        same_calls(compiled, eager, layout, CASES[case])
        same_products_wait(compiled, eager, layout)


def same_calls(
    compiled: tuple[Compiled, ...], eager: tuple[Compiled, ...], layout: dict[str, Any], case: Case
) -> None:  # fmt: skip
    """Compiled code sends what eager code sends, on all ranks in one order."""
    assert layout.get("pp") or compiled[0].calls == compiled[1].calls, layout
    for run, other in zip(compiled, eager, strict=True):
        assert Counter(run.calls) == Counter(other.calls), layout


def same_products_wait(
    compiled: tuple[Compiled, ...], eager: tuple[Compiled, ...], layout: dict[str, Any]
) -> None:  # fmt: skip
    """In a schedule that splits, every W makes as many products as it does of eager code, which is not warmed up."""
    splits = layout.get("schedule") in SPLIT
    for run, other in zip(compiled, eager, strict=True):
        assert bool(run.left) == bool(other.left) == splits, layout
        assert not splits or (run.left[-len(other.left) :] == other.left and min(run.left) > 0), layout


WITHIN = [
    {"tp": 2, "sp": True, "tp_chunks": 2},
    {"dp_shard": 2, "zero": 0},
    {"dp_shard": 2, "zero": 3, "recompute": "selective"},
    {"cp": 2, "recompute": "full", "recompute_layers": 1},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_axis_keeps_split_passes() -> None:
    """Beside a pipeline, with replicas whose sums start behind the last W, and with gathered parameters."""
    layouts = [{"pp": 2, "micro_batch": 1, "schedule": "zb-h1", **axes} for axes in WITHIN]
    alone = outcome(CASES["dense"], Layout(compile="off"))
    runs = list(zip(*on_ranks(4, all_trained, "dense", layouts, BACKEND, limit_s=900), strict=True))
    for layout, compiled, eager in zip(layouts, runs[::2], runs[1::2], strict=True):
        assert first_difference(alone, [rank.outcome for rank in compiled]) is None, layout
        kinds = 2 if "recompute_layers" in layout else 1
        assert [(rank.graphs, rank.breaks) for rank in compiled] == [(kinds, ())] * 4, layout
        same_products_wait(compiled, eager, layout)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_routed_blocks_are_one_graph_where_their_experts_are_here() -> None:
    """Whatever lengths the experts' runs of rows have in a step."""
    layouts: list[dict[str, Any]] = [{"tp": 2, "recompute": policy} for policy in POLICIES]
    layouts += [{"cp": 2, "zero": 0}, {"pp": 2, "micro_batch": 1, "schedule": "zb-h1"}]
    alone = outcome(CASES["routed"], Layout(compile="off"))
    runs = list(zip(*on_ranks(2, all_trained, "routed", layouts, BACKEND, limit_s=900), strict=True))
    for layout, compiled, eager in zip(layouts, runs[::2], runs[1::2], strict=True):
        assert first_difference(alone, [rank.outcome for rank in compiled]) is None, layout
        assert [(rank.graphs, rank.breaks) for rank in compiled] == [(1, ())] * 2, layout
        same_products_wait(compiled, eager, layout)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "layouts", "graphs"),
    [
        ("routed", [{}, {"zero": 3, "recompute": "full"}], 2),
        ("shared", [{"zero": 1}, {"ep_chunks": 2, "recompute": "selective"}], 5),
    ],
)
def test_routed_blocks_are_two_graphs_around_experts_on_other_ranks(
    case: str, layouts: list[dict[str, Any]], graphs: int
) -> None:
    """One before the rows that travel and one behind, whatever runs of rows a step has; two more of shared experts,
    which are computed beside them, and one of a dense block. What ZeRO gathers for the experts cuts none."""
    layouts = [{"dp_shard": 2, "ep": 2, **layout} for layout in layouts]
    alone = outcome(CASES[case], Layout(compile="off"))
    runs = list(zip(*on_ranks(2, all_trained, case, layouts, BACKEND, limit_s=900), strict=True))
    for layout, compiled, eager in zip(layouts, runs[::2], runs[1::2], strict=True):
        for ranks in (compiled, eager):
            assert first_difference(alone, [rank.outcome for rank in ranks]) is None, layout
        assert [(rank.graphs, rank.breaks) for rank in compiled] == [(graphs, ())] * 2, layout
        assert [sorted(rank.calls) for rank in compiled] == [sorted(rank.calls) for rank in eager], layout


def gradients_of(name: str, layout: Layout, backend: str) -> tuple[list[int], list[dict[str, Tensor | None]]]:
    """Of a model on one device, whose two backward passes are split: how many products wait, and the gradients of all
    parameters before and after they are made."""
    torch._dynamo.reset()
    whole, torch.compile = torch.compile, partial(torch.compile, backend=backend)  # type: ignore[assignment]
    try:
        laid_out = on_one_device(model(name), layout).model
    finally:
        torch.compile = whole
    left, gradients = [], []
    for step in range(2):
        queue = WeightGradients()
        with splitting():
            loss = laid_out.loss(tokens(2, 16, seed=step), tokens(2, 16, seed=step + 1))
            with queue:
                (loss.cross_entropy + (0 if loss.balance is None else loss.balance.sum())).backward()
        for _ in range(2):
            gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in laid_out.named_parameters()})
            left.append(len(queue))
            queue.run()
    return left, gradients


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "recompute", "backend"),
    [(name, "none", BACKEND) for name in KINDS]
    + [("qwen3-30b-a3b", policy, BACKEND) for policy in POLICIES[1:]]
    + [(name, "none", "inductor") for name in ("llama-3.1-8b", "qwen3-30b-a3b")],
)
def test_what_compiled_code_leaves_for_later(name: str, recompute: Any, backend: str) -> None:
    """In B no matrix of a layer gets a gradient, in W each gets its own: what waits has not been overwritten."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    layout = Layout(compile="on", recompute=recompute)
    compiled = gradients_of(name, layout, backend)
    assert counters["stats"]["unique_graphs"] == 1 + (name == "deepseek-v3") and not counters["graph_break"]
    assert_as_eager(compiled, gradients_of(name, replace(layout, compile="off"), backend))


def assert_as_eager(
    compiled: tuple[list[int], list[dict[str, Tensor | None]]], eager: tuple[list[int], list[dict[str, Tensor | None]]]
) -> None:
    """As many products wait, and gradients are the same."""
    assert compiled[0] == eager[0] and compiled[0][0] > 0 == compiled[0][1]
    for gradients, other in zip(compiled[1], eager[1], strict=True):
        norm = float(torch.cat([gradient.flatten() for gradient in other.values() if gradient is not None]).norm())
        for key, gradient in other.items():
            mine = gradients[key]
            assert (mine is None) == (gradient is None), key
            if mine is not None and gradient is not None:
                apart = float((mine - gradient).abs().max())
                assert apart <= 1e-5 * max(float(gradient.abs().max()), ZERO * norm), key


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2-small"])
def test_products_of_onednn_are_left_for_later_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which compiled code makes the gradients in one operator, whatever this processor is."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(compat, "blas_is_slow", lambda: True)
    monkeypatch.setattr(cpu_product, "LEAST", 1)
    layout = Layout(compile="on")
    compiled = gradients_of(name, layout, BACKEND)
    assert_as_eager(compiled, gradients_of(name, replace(layout, compile="off"), BACKEND))


@pytest.mark.filterwarnings("ignore")
def test_code_of_split_passes_is_for_no_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass has nobody to leave products to."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=BACKEND))
    compiled = on_one_device(model("llama-2-7b"), Layout(compile="on")).model
    with splitting(), pytest.raises(AssertionError, match="split backward pass runs in a whole one"):
        compiled.loss(tokens(1, 8), tokens(1, 8)).cross_entropy.backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_generated_code_has_the_values_of_eager_code() -> None:
    """The default backend, C++ on a CPU, of the layouts whose collectives are operators."""
    layouts = [LAYOUTS["tp + sp"][1][2], LAYOUTS["cp ring"][1][2]]
    alone = outcome(CASES["dense"], Layout(compile="off"))
    for at, ranks in enumerate(zip(*on_ranks(2, all_trained, "dense", layouts, "inductor", limit_s=900), strict=True)):
        assert first_difference(alone, [rank.outcome for rank in ranks]) is None, layouts[at // 2]
        assert at % 2 or ranks[0].graphs == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_a_long_sequence_is_one_graph_as_well(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, where the form of attention is chosen by its length; with borders of documents and without."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    shape = replace(shrink(name), layers=2, hidden=64, heads=1, kv_heads=1, head_dim=64, max_positions=512)
    compiled = on_one_device(build(shape), Layout(compile="on")).model
    documents = torch.arange(2 * 256).view(2, 256) // 100
    for kinds, options in enumerate(({}, {"documents": documents}), start=1):
        compiled.hidden(tokens(2, 256), **options)[0].sum().backward()
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] == kinds and not counters["graph_break"]


STEP = """
import json, torch
from meshwright.model import build
from meshwright.observe.oracle.features import shrink
from meshwright.parallel import on_one_device
from meshwright.spec import Layout

shape = shrink("llama-3.1-8b")
engine = on_one_device(build(shape), Layout(compile="on", recompute="RECOMPUTE"))
engine.model.hidden(torch.zeros(1, 16, dtype=torch.int64))[0].sum().backward()
print(json.dumps(torch._dynamo.utils.counters["inductor"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_second_run_compiles_nothing(recompute: str, tmp_path: Path) -> None:
    """Another process with the same cache folder: its graphs are all found there."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", STEP.replace("RECOMPUTE", recompute)]
    counts = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
        counts.append(json.loads(done.stdout))
    first, second = counts
    assert first["fxgraph_cache_miss"] == second["fxgraph_cache_hit"] == 2
    assert "fxgraph_cache_miss" not in second


WIDE = """
import json, torch
from meshwright.parallel.blocks.compiling import prepare

prepare()
double = torch.compile(lambda x: x * 2 + 1)
x = torch.arange(2**20, dtype=torch.float32)
hits = torch._dynamo.utils.counters["inductor"]
print(json.dumps([int((double(x) != x * 2 + 1).sum()), hits["fxgraph_cache_hit"], torch.compiler.config.cache_key_tag]))
"""


@pytest.mark.slow
def test_code_for_other_vectors_is_not_taken(tmp_path: Path) -> None:
    """With one cache folder, code of wide vectors first: found by a CPU of narrow ones it would leave out half of the
    numbers. The same CPU again finds its own."""
    answers = []
    for width in ("avx512", "avx2", "avx512"):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": width}
        command = [sys.executable, "-W", "ignore", "-c", WIDE]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
        answers.append(json.loads(done.stdout))
    wrong, hits, tags = zip(*answers, strict=True)
    assert wrong == (0, 0, 0)
    assert hits == ((0, 0, 1) if tags[0] != tags[1] else (0, 1, 1))  # a CPU without AVX-512 has one width


def test_a_tag_of_the_cache_is_kept_beside_the_width() -> None:
    """The user's own, from TORCH_COMPILE_CACHE_KEY_TAG; named once however often it is asked for."""
    width = torch.backends.cpu.get_cpu_capability()
    for tag, wanted in (("mine", f"mine{width}"), ("", width)):
        with torch.compiler.config.patch(cache_key_tag=tag):
            for _ in range(2):
                torch_compile.keep_code_by_cpu()
                assert torch.compiler.config.cache_key_tag == wanted


def test_an_engine_runs_plainly_what_no_plan_has_chosen_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """`train` settles both words before: a caller of the engine alone gets no other default."""
    world = make_mesh(Layout(compile="off"))["world"]
    for layout, device, lines in (
        (Layout(), CUDA, 1), (Layout(compile="on"), CUDA, 0), (Layout(), torch.device("cpu"), 0),
    ):  # fmt: skip
        caplog.clear()
        plain = resolve_auto(layout, device, world)
        assert plain.compile == ("on" if layout.compile == "on" else "off") and plain.cuda_graphs == "off"
        assert len(caplog.messages) == lines
        assert is_compiled(Layout(), device) is False


def test_without_triton_or_a_compiler_on_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never gets to the first step."""
    lacks = "a C compiler (gcc or clang)"
    monkeypatch.setattr(torch_compile, "compile_tool_missing", lambda kind: lacks)
    for device in (CUDA, torch.device("cpu")):
        with pytest.raises(PlanError, match=r"layout.compile=on .*C compiler.* layout.compile=off"):
            is_compiled(Layout(compile="on"), device)
    monkeypatch.setattr(torch_compile, "compile_tool_missing", lambda kind: "")
    assert is_compiled(Layout(compile="on"), CUDA)


def test_blocks_beside_codes_stay_uncompiled_and_a_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they would be compiled otherwise: not on a CPU, and not where compile=off asks for it."""
    monkeypatch.setattr(torch_compile, "compile_tool_missing", lambda kind: "")
    plain = shrink("llama-3.1-8b")
    codes = replace(plain, lora=LoRAShape(rank=2, alpha=4.0, base="nf4"))
    [note] = compile_notes(Layout(compile="on"), CUDA, codes)
    assert note.startswith("blocks run uncompiled") and "held as codes" in note
    assert not compile_notes(Layout(compile="on"), CUDA, plain)
    assert not compile_notes(Layout(compile="off"), CUDA, codes)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_what_is_missing_is_found_as_the_compilers_look(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search path without a compiler; then one of CC or CXX; Triton stands in as an empty module."""
    missing = torch_compile.compile_tool_missing.__wrapped__
    if kind == "cpu":
        from torch._inductor import config

        assert missing(kind) == ""
        with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
            assert missing(kind) == "a C++ compiler (g++ or clang++)"
        return
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.delenv("CC", raising=False)
    assert missing(kind) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing(kind) == "a C compiler (gcc or clang)"
    monkeypatch.setenv("CC", "mycc -O2")
    assert missing(kind) == "the C compiler CC=mycc -O2"
    Path(tmp_path, "mycc").touch(mode=0o755)
    assert missing(kind) == ""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert missing(kind) == "Triton"
    Path(tmp_path, "triton.py").write_text("raise OSError('no libcuda')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton")
    assert "no libcuda" in missing(kind)


def compiled_model(monkeypatch: pytest.MonkeyPatch) -> Transformer:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return on_one_device(model("llama-2-7b"), Layout(compile="on")).model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_more_kinds_of_calls_are_compiled_than_torch_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """{training, evaluation} x six numbers of rows; by torch's own limit the ninth would run eager."""
    compiled = compiled_model(monkeypatch)
    for rows in range(1, 7):
        compiled.train().hidden(tokens(rows, 8))
        with torch.no_grad():
            compiled.eval().hidden(tokens(rows, 8))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 12 <= VARIANTS


@pytest.mark.filterwarnings("ignore")
def test_a_limit_that_is_hit_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And torch's own five lines are not."""
    compiled = compiled_model(monkeypatch)
    with torch._dynamo.config.patch(recompile_limit=1), caplog.at_level(logging.WARNING):
        for rows in (1, 2):
            compiled.hidden(tokens(rows, 8))
    messages = [record.getMessage() for record in caplog.records]
    assert len([line for line in messages if "uncompiled" in line]) == 1
    assert not any("torch._dynamo hit" in line for line in messages)
