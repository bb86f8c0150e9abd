"""Start of an engine on a GPU: the cache takes a share of what is free there beside weights, graphs and a step."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.serving.engine import engine_start, step_graphs
from meshwright.serving.engine.cache import paged_cache
from meshwright.serving.engine.cache.paged_cache import bytes_per_block
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.engine_start import CacheRoom, StartedEngine, start
from meshwright.serving.engine.rows.request_adapters import RequestAdapters
from meshwright.serving.engine.runner import Runner
from meshwright.serving.engine.sampler import DrawnTokens
from meshwright.serving.engine.scheduler import StepPlan
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.speculation import Speculation
from meshwright.serving.engine.step_graphs import StepGraphs, StepMemory
from meshwright.spec.errors import ArgumentError, DoesNotFit
from meshwright.spec.plan.execution import GRAPH_POOLS
from tests.model.shrunk import KINDS, VOCAB, model
from tests.operation_recorder import Recorder
from tests.serving.engine.test_step_graphs import attend_rows

FOUND = model(KINDS[2]).eval()
BLOCK = bytes_per_block(FOUND, 4)
LONGEST = 40


class FakeMemory:
    """A device of so many free bytes, whose steps take what their work is said to take, one after the other."""

    def __init__(self, free: int, *peaks: int) -> None:
        self.free, self.peaks, self.ran = free, list(peaks), 0

    def free_bytes(self) -> int:
        return self.free

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        self.ran += 1
        return self.peaks[(self.ran - 1) % len(self.peaks)]


def started(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch, **options: Any) -> StartedEngine:
    monkeypatch.setattr(engine_start, "device_memory", lambda _: memory)
    sizes = {"block": 4, "most_tokens": 24, "most_sequences": 6, "longest": LONGEST, "packed": False}
    chosen = EngineOptions(**{**sizes, **options})
    with torch.no_grad():
        return start(FOUND, chosen, RequestAdapters(FOUND, exact=False), None)


def test_a_share_of_what_is_free_beside_the_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps really run, twice, since the first one compiles: chunks, a token of each answer, and its choice."""
    free, step = 40 * BLOCK, 10 * BLOCK
    memory = FakeMemory(free, step - 3, 5, step)
    engine = started(memory, monkeypatch)
    assert memory.ran == 6 and engine.blocks == int(0.9 * (free - step)) // BLOCK == 27
    assert engine.runners[0].cache.number == 27 and engine.longest == LONGEST
    assert "27 x" not in engine.memory and "108 tokens" in engine.memory and "90% of the rest" in engine.memory
    half = started(FakeMemory(free, step), monkeypatch, memory_share=0.5)
    assert half.blocks == 15
    engine_of_bytes = started(FakeMemory(0, 0), monkeypatch, cache_bytes=12 * BLOCK)
    assert engine_of_bytes.blocks == 12


def test_a_step_of_prompts_is_measured_beside_logits_whose_tokens_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server launches it: they are kept until the tokens are read, beside all that the step makes."""
    waiting, behind = set[int](), list[tuple[int, int]]()
    run, made, read = Runner.run, engine_start.draw, DrawnTokens.read

    def launched(runner: Runner, step: StepPlan, **more: Any) -> Any:
        behind.append((max(step.chunks.values()), len(waiting)))
        return run(runner, step, **more)

    def drawn(*arguments: Any) -> DrawnTokens:
        tokens = made(*arguments)
        waiting.add(id(tokens))
        return tokens

    def arrived(tokens: DrawnTokens) -> Any:
        waiting.remove(id(tokens))
        return read(tokens)

    monkeypatch.setattr(Runner, "run", launched)
    monkeypatch.setattr(engine_start, "draw", drawn)
    monkeypatch.setattr(DrawnTokens, "read", arrived)
    started(FakeMemory(40 * BLOCK, 0), monkeypatch)
    assert {(24, 1), (1, 1)} <= set(behind), "a chunk of 24 tokens, and a step of decoding"
    assert max(count for _, count in behind) == 1 and not waiting


def test_no_more_than_all_answers_can_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(FakeMemory(10**6 * BLOCK, 0), monkeypatch).blocks == 6 * LONGEST // 4


def test_refused_at_the_start_where_the_longest_sequence_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the numbers, and with what fits. Of the model's own positions as many as fit are taken."""
    few = FakeMemory(10 * BLOCK, BLOCK)
    with pytest.raises(DoesNotFit, match=r"holds 32 positions and one sequence has longest=40: take longest=32\. "):
        started(few, monkeypatch)
    assert started(few, monkeypatch, longest=32).blocks == 8
    shorter = started(few, monkeypatch, longest=0)
    assert shorter.longest == 32 < FOUND.shape.max_positions
    with pytest.raises(DoesNotFit, match=r"holds 0 positions .* take a smaller longest"):
        started(FakeMemory(BLOCK, BLOCK), monkeypatch, longest=0)


def test_refused_where_a_step_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(FakeMemory):
        def peak_bytes(self, work: Callable[[], object]) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(DoesNotFit, match=r"^the largest step does not fit .* take a smaller longest"):
        started(Full(0, 0), monkeypatch)


def test_a_model_that_guesses_has_a_part_of_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(80 * BLOCK, 0)
    engine = started(memory, monkeypatch, speculation=Speculation(tokens=2, draft=model(KINDS[2]).eval()))
    assert memory.ran == 12 and engine.blocks == 36 and len(engine.runners) == 2


def test_graphs_are_counted_and_captured_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, recorder = list[str](), Recorder()

    def graphs_of(engine: Any, cache: Any, wanted: str, *, ranks: int, **sizes: Any) -> tuple[StepGraphs | None, str]:
        if wanted == "off":
            return None, "off"
        recorder.tensors = lambda: [tensor for layer in cache.layers for tensor in layer.tensors]
        return StepGraphs(engine, cache, recorder, **sizes), "on"

    monkeypatch.setattr("meshwright.serving.engine.runner.step_graphs", graphs_of)
    monkeypatch.setattr(paged_cache, "attend_rows", attend_rows)
    monkeypatch.setattr("meshwright.serving.engine.engine_start.reason_without", lambda *_: "")
    memory = FakeMemory(200 * BLOCK, 0, 4 * BLOCK, 0)
    with_fakes = {"copies_bytes": 0, "compiled": False, "on_progress": lines.append}
    monkeypatch.setattr(step_graphs, "SECONDS_BETWEEN", 0.0)
    engine = started(memory, monkeypatch, **with_fakes)
    (runner,) = engine.runners
    graphs = runner.graphs
    assert graphs is not None and graphs.graphs.captured == len(graphs.rows) * len(graphs.positions)
    standing = StepMemory.bytes_of(6, 1 + 6 * LONGEST // 4, VOCAB)
    room = CacheRoom(
        free_bytes=200 * BLOCK, step_bytes=4 * BLOCK, graphs_bytes=int(GRAPH_POOLS * 4 * BLOCK) + standing, share=0.9
    )
    assert engine.blocks == min(6 * LONGEST // 4, room.cache_bytes // BLOCK)
    assert lines[0].startswith("cache: ") and lines[1] == f"CUDA graphs: 0 of {graphs.graphs.captured} are captured"
    assert lines[-1].startswith(f"CUDA graphs: {graphs.graphs.captured} are captured, in ")
    lazily = started(memory, monkeypatch, **with_fakes, warm_start=False)
    assert lazily.runners[0].graphs is not None and lazily.runners[0].graphs.graphs.captured == 0


def test_graphs_captured_at_the_start_outlive_matrices_that_the_first_step_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Matrices of one input are joined in the first step. Graphs are dropped when weights have moved since they were
    read, so that this step must be over before the first graph."""
    served, moved = model(KINDS[2]).eval(), list[int]()
    recorder, plain = Recorder(), StepGraphs._work

    def joining(graphs: StepGraphs, head: Any) -> Any:
        step = plain(graphs, head)

        def work(row_step: Any) -> None:
            if not moved:
                weight = next(served.parameters())
                weight.data = weight.data.clone()
                moved.append(1)
            step(row_step)

        return work

    def graphs_of(network: Any, cache: Any, wanted: str, *, ranks: int, **sizes: Any) -> tuple[StepGraphs | None, str]:
        recorder.tensors = lambda: [tensor for layer in cache.layers for tensor in layer.tensors]
        return StepGraphs(network, cache, recorder, **sizes), "on"

    monkeypatch.setattr("meshwright.serving.engine.runner.step_graphs", graphs_of)
    monkeypatch.setattr(paged_cache, "attend_rows", attend_rows)
    monkeypatch.setattr(StepGraphs, "_work", joining)
    monkeypatch.setattr(engine_start, "device_memory", lambda _: FakeMemory(0, 0))
    options = EngineOptions(
        block=4, most_tokens=24, most_sequences=6, longest=LONGEST, packed=False, copies_bytes=0, compiled=False,
        cache_bytes=64 * BLOCK,
    )  # fmt: skip
    with torch.no_grad():
        (runner,) = start(served, options, RequestAdapters(served, exact=False), None).runners
    assert moved and runner.graphs is not None
    forms = runner.graphs.graphs
    assert forms.captured == len(runner.graphs.rows) * len(runner.graphs.positions)
    forms.read([*served.parameters(), *served.buffers()])
    assert forms.captured == len(runner.graphs.rows) * len(runner.graphs.positions)


def test_an_engine_that_nobody_has_gives_its_cache_back() -> None:
    """At once, without the garbage collector: the next engine measures what is free."""
    engine = ServingEngine(FOUND, EngineOptions(block=4, most_tokens=24, most_sequences=6))
    cache = weakref.ref(engine.cache)
    gc.disable()
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()


def test_a_cpu_is_told_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_start, "device_memory", lambda _: None)
    options = EngineOptions(most_tokens=24, most_sequences=6)
    with pytest.raises(ArgumentError, match="cache_bytes=0 is for a GPU"):
        start(FOUND, options, RequestAdapters(FOUND, exact=False), None)
    with pytest.raises(ArgumentError, match=r"memory_share=1\.5 must be above 0"):
        EngineOptions(memory_share=1.5)


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    network = model(KINDS[2]).to("cuda", torch.bfloat16).eval()
    engine = ServingEngine(network, EngineOptions(longest=512))
    free, total = torch.cuda.mem_get_info()
    assert engine.options.most_sequences == 256 and engine.options.most_tokens >= 512
    assert "the weights leave" in engine.memory and free < total
