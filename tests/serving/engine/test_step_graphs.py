"""CUDA graphs of an engine's steps (EngineOptions.cuda_graphs): what a CPU can prove of them, and what a GPU must."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.serve_quantized import quantized
from meshwright import compat
from meshwright.kernels.attention.paged import PagedStore, RowsCall
from meshwright.kernels.chooser import simulate_device
from meshwright.kernels.experts import experts
from meshwright.model import Transformer
from meshwright.model.quantized_weights import QuantizedWeight
from meshwright.parallel import build_engine
from meshwright.parallel.groups.mesh import make_mesh
from meshwright.parallel.pipeline.pass_graphs import WARM, Capture, NoCapture
from meshwright.serving.engine import step_graphs
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache import paged_cache
from meshwright.serving.engine.cache.paged_cache import PagedCache
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.speculation import Speculation
from meshwright.serving.engine.step_graphs import RowStep, StepGraphs, reason_without
from meshwright.spec import Layout
from meshwright.spec.errors import ArgumentError
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.plan import execution
from meshwright.spec.plan.execution import CacheForm, position_numbers, row_numbers
from tests.kernels.references import attend_rows_reference
from tests.model.shrunk import KINDS, VOCAB, model
from tests.operation_recorder import OnDeviceOnly, Recorder
from tests.training.test_pass_graphs import aligned

PROMPTS = [[3, 14, 15, 9, 2, 6, 5], [1], [7, 8, 7, 8, 7, 8, 7, 8], list(range(1, 40)), [11, 12, 13]]
SIZES: dict[str, Any] = {"block": 4, "most_tokens": 24, "most_sequences": 6, "compiled": False, "packed": False}
MIXED = {"gqa": KINDS[2], "window": KINDS[3], "biases": KINDS[4], "moe": KINDS[7], "mla": KINDS[8], "gpt": KINDS[0]}


@torch.library.custom_op("meshwright_tests::attend_rows", mutates_args=())
def attend_in_one(
    q: Tensor, keys: Tensor, values: Tensor, key_scales: Tensor | None, value_scales: Tensor | None, tables: Tensor,
    offsets: Tensor, last: Tensor, longest: int, width: int, window: int, scale: float,
) -> Tensor:  # fmt: skip
    """As the kernel of a GPU: one operation, which reads on the device where rows are; all else it is launched with."""
    assert int(last.max()) < longest, "the kernel is launched for fewer positions than a row sees"
    read = [
        codes if scales is None else codes.float() * scales.unsqueeze(-1)
        for codes, scales in ((keys, key_scales), (values, value_scales))
    ]
    call = RowsCall(tables, offsets, last, longest)
    return attend_rows_reference(q, *read, call, width=width, window=window, scale=scale)


@attend_in_one.register_fake
def _(q: Tensor, *arguments: Any) -> Tensor:
    return q.new_empty(*q.shape[:2], arguments[-3])


def attend_rows(
    loops: Any, q: Tensor, keys: PagedStore, values: PagedStore, call: RowsCall, **more: Any
) -> Tensor:  # fmt: skip
    where = keys.codes, values.codes, keys.scales, values.scales, call.tables, call.offsets, call.last, call.longest
    attended: Tensor = attend_in_one(q, *where, more["width"], more["window"], more["scale"])
    return attended


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows read blocks where they lie; experts read the lengths of their runs on the device; and graphs of few
    positions, so that answers pass from one to the next."""
    monkeypatch.setattr(paged_cache, "row_kernel", lambda *_: (True, "a kernel that stands in"))
    monkeypatch.setattr(paged_cache, "attend_rows", attend_rows)
    monkeypatch.setattr(experts, "groups_on_device", lambda rows, weights: bool(len(rows)))
    monkeypatch.setattr(execution, "SPLIT", 8)


class Served:
    """An engine whose steps are kept, with graphs that `capture` plays; None = without."""

    def __init__(self, network: Transformer, capture: Capture | None, **options: Any) -> None:
        adapters = options.pop("adapters", None)
        self.engine = ServingEngine(network, EngineOptions(**{**SIZES, **options}), adapters=adapters)
        self.logits = list[Tensor]()
        self.graphs = list[StepGraphs]()
        runner = self.engine._loop.runner
        draft = self.engine._loop.draft
        for part in [runner, *([draft.runner] if draft else [])] if capture is not None else []:
            rows, many = self.engine.options.most_rows, self.engine.options.most_sequences
            assert capture is not None
            part.graphs = StepGraphs(
                part.model, part.cache, capture, rows=rows, sequences=many, longest=self.engine.longest
            )
            self.graphs.append(part.graphs)
        if isinstance(capture, Recorder):
            layers = [layer for part in self.graphs for layer in part._cache.layers]
            capture.tensors = lambda: [stored for layer in layers for stored in layer.tensors]
        compute = runner.compute

        def stored(*arguments: Any) -> Any:
            owners, logits = compute(*arguments)
            self.logits.append(logits)
            return owners, logits

        runner.compute = stored  # type: ignore[method-assign]

    def answer(self, asked: Callable[[int], dict[str, Any]] = lambda number: {}) -> list[list[int]]:
        """Requests that come in the middle of others, of different lengths, and more than there is room for."""
        requests = []
        for number, prompt in enumerate(PROMPTS * 2):
            options = {"max_new_tokens": 12 + 5 * (number % 3), "ignore_end": True, **asked(number)}
            requests.append(self.engine.add(prompt, RequestOptions(**options)))
            if number % 2:
                self.engine.step()
        self.engine.run(requests)
        assert self.engine.idle and self.engine.tables.pool.free == self.engine.tables.pool.size
        return [list(answer.ids) for request in requests for answer in request.answers]

    @property
    def launched(self) -> int:
        return self.graphs[0].launched


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(*pair) for pair in zip(left, right, strict=True))


@pytest.mark.parametrize("name", MIXED)
def test_repeated_operations_answer_as_steps_do(name: str) -> None:
    """Logits have the bits of steps with as many rows that were computed anew: nothing that changes from step to step
    stayed in a graph. Of steps without rows that nobody asked for they have the tokens, and the logits but for
    rounding."""
    network = model(MIXED[name]).eval()
    recorder = Recorder()
    plain, padded, graphed = (Served(network, capture) for capture in (None, NoCapture(), recorder))
    right = plain.answer()
    assert graphed.answer() == padded.answer() == right
    assert recorder.launches == graphed.launched > len(graphed.logits) / 2
    assert same(graphed.logits, padded.logits)
    assert all(torch.allclose(*pair, atol=2e-3) for pair in zip(graphed.logits, plain.logits, strict=True))
    (graphs,) = graphed.graphs
    assert 1 < graphs.graphs.captured <= len(graphs.rows) * len(graphs.positions)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_caches_of_codes(form: CacheForm) -> None:
    network = model(MIXED["gqa"]).eval()
    padded, graphed = (Served(network, capture, cache_dtype=form) for capture in (NoCapture(), Recorder()))
    assert graphed.answer() == padded.answer() and same(graphed.logits, padded.logits) and graphed.launched


@pytest.mark.parametrize("draft", [False, True])
def test_guesses_are_rows_as_others(draft: bool) -> None:
    """Of the model and of what guesses for it."""
    network = model(MIXED["gqa"]).eval()
    guesses = Speculation(tokens=3, draft=model(MIXED["gqa"], louder=8.2).eval() if draft else None)
    plain, padded, graphed = (
        Served(network, capture, speculation=guesses) for capture in (None, NoCapture(), Recorder())
    )
    assert graphed.answer() == padded.answer() == plain.answer()
    assert same(graphed.logits, padded.logits)
    assert all(capture.launched for capture in graphed.graphs) and len(graphed.graphs) == 1 + draft
    assert graphed.engine.guesses is not None and graphed.engine.guesses.accepted


def test_rows_of_adapters_run_as_they_are() -> None:
    network = model(MIXED["gqa"]).eval()
    shape, chance = LoRAShape(rank=2, alpha=8.0, targets="q"), torch.Generator().manual_seed(1)
    q = network.blocks[0].attention.q
    name = next(key for key, module in network.named_modules() if module is q)
    tensors = {
        f"{name}.lora.a": torch.randn(2, q.in_features, generator=chance),
        f"{name}.lora.b": torch.randn(q.out_features, 2, generator=chance),
    }
    adapters = {"one": ServedAdapter(shape, tensors)}
    plain, graphed = (Served(network, capture, adapters=adapters) for capture in (None, Recorder()))

    def asked(number: int) -> dict[str, Any]:
        return {"adapter": "one"} if number < 3 else {}

    answers = graphed.answer(asked)
    assert answers == plain.answer(asked) != Served(network, None).answer()
    assert 0 < graphed.launched < len(graphed.logits)


def test_several_answers_beams_and_preemption() -> None:
    """Sequences that share blocks, and steps in which one gives its own back."""
    network = model(MIXED["gqa"]).eval()
    few = {"cache_bytes": 30 * paged_cache.bytes_per_block(network, 4)}
    plain, padded, graphed = (Served(network, capture, **few) for capture in (None, NoCapture(), Recorder()))

    def asked(number: int) -> dict[str, Any]:
        return {"beams": 2} if number == 4 else {"n": 2, "temperature": 0.8, "seed": number} if number % 3 == 1 else {}

    assert graphed.answer(asked) == padded.answer(asked) == plain.answer(asked)
    assert same(graphed.logits, padded.logits) and graphed.launched
    assert graphed.engine.scheduler.preemptions > 0


def test_weights_that_were_put_elsewhere_are_captured_anew() -> None:
    network = model(MIXED["gqa"]).eval()
    served, asked = Served(network, Recorder()), RequestOptions(max_new_tokens=WARM + 4, ignore_end=True, salt=None)
    answers, launches = [], []
    for louder in (1.0, 1.5):
        for parameter in network.parameters():
            parameter.data = parameter.data * louder
        request = served.engine.add(PROMPTS[0], asked)
        served.engine.run([request])
        answers.append(list(request.answers[0].ids))
        launches.append(served.launched)
    fresh = Served(network, None)
    request = fresh.engine.add(PROMPTS[0], asked)
    fresh.engine.run([request])
    assert answers[1] == request.answers[0].ids != answers[0]
    assert launches[1] == 2 * launches[0] > 0


def test_numbers_of_rows_and_positions() -> None:
    assert row_numbers(1) == (1,) and row_numbers(5) == (1, 2, 4, 5)
    assert row_numbers(64) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    for most in range(1, 300):
        numbers = row_numbers(most)
        assert list(numbers) == sorted(set(numbers)) and numbers[-1] == most
        assert all(wide <= max(2 * narrow, 1) for narrow, wide in pairwise(numbers))
    assert position_numbers(8) == (8,) and position_numbers(9) == (8, 16)
    assert position_numbers(1000) == (8, 32, 128, 512, 1000)


def test_memory_is_what_graphs_read_and_leave_beside_their_pool() -> None:
    network = model(MIXED["gqa"]).eval()
    served = Served(network, Recorder())
    rows, blocks = 6, 1 + 6 * -(-network.shape.max_positions // 4)
    assert served.engine.graphs_bytes == 8 * (5 * rows + blocks) + 4 * rows * VOCAB
    assert Served(network, None).engine.graphs_bytes == 0


def test_tables_beyond_the_memory_run_as_they_are() -> None:
    network = model(MIXED["gqa"]).eval()
    served = Served(network, Recorder())
    memory = step_graphs.StepMemory(2, 3, VOCAB, torch.device("cpu"))
    step = RowStep(torch.zeros(5, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), 8, memory)
    assert step.form() is None and RowStep(step.numbers, step.tables[:3], 8, memory).form() == (2, 8)
    assert served.engine.cuda_graphs == "off (graphs are for a GPU, and this is a cpu)"


def on_gpu(network: Transformer) -> Transformer:
    """The same model, which says that it is on a GPU."""

    class Weight:
        device, dtype = torch.device("cuda", 0), torch.bfloat16

    class Elsewhere:
        embed = type("Embed", (), {"weight": Weight})
        shape, kernels, modules = network.shape, network.kernels, network.modules

    return Elsewhere()  # type: ignore[return-value]  # what is asked of a model, and no more


def test_what_cannot_be_captured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    network = model(MIXED["moe"]).eval()
    cache = PagedCache(network, 2, 4)
    with pytest.raises(ArgumentError, match=r"^cuda_graphs='on' cannot be: graphs are for a GPU, .*cuda_graphs='auto'"):
        ServingEngine(network, EngineOptions(cuda_graphs="on"))
    with pytest.raises(ArgumentError, match=r"cuda_graphs='maybe' is not known: take one of auto, on, off"):
        EngineOptions(cuda_graphs="maybe")  # type: ignore[arg-type]  # that is refused
    assert ServingEngine(network, EngineOptions(cuda_graphs="off", **SIZES)).cuda_graphs == "off (cuda_graphs=off)"
    there = on_gpu(network)
    monkeypatch.setattr(step_graphs, "counts_stay", lambda *_: True)
    assert reason_without(there, cache, 1) == ""
    assert "2 ranks" in reason_without(there, cache, 2)
    monkeypatch.setattr(step_graphs, "counts_stay", lambda *_: False)
    assert "experts" in reason_without(there, cache, 1)
    monkeypatch.setattr(step_graphs, "counts_stay", lambda *_: True)
    assert "quantized experts" in reason_without(on_gpu(quantized(model(MIXED["moe"]), "int4-rtn")), cache, 1)
    by_threshold = quantized(model(MIXED["gqa"]), "int8")
    for module in by_threshold.modules():
        if isinstance(module, QuantizedWeight):
            module.scheme = replace(module.scheme, outliers="threshold", threshold=6.0, scales="float32")
    assert "outliers" in reason_without(on_gpu(by_threshold), cache, 1)
    for scheme in ("int4-rtn", "nf4", "int8", "fp8"):
        assert reason_without(on_gpu(quantized(model(MIXED["gqa"]), scheme)), cache, 1) == ""
    cache.by_rows, cache.attention = False, "torch (heads are 576 wide, more than 256)"
    assert "576 wide" in reason_without(there, cache, 1)


@pytest.fixture
def fake() -> Iterator[None]:
    with compat.fake_world(0, 1), compat.fake_tensors(), simulate_device("cuda"):
        yield


class NothingFromHost(OnDeviceOnly):
    """A number of the host that becomes a tensor is copied, for which a capture cannot wait either."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten.lift_fresh.default, "a tensor is made of numbers of the host"
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("name", MIXED)
def test_no_step_of_a_gpu_waits_for_its_values(name: str) -> None:
    """The very calls of a GPU's step, on tensors without values."""
    layout = Layout(compile="off")
    engine_of_gpu = build_engine(
        aligned(MIXED[name]), layout, mesh=make_mesh(layout), dtype=torch.bfloat16, initialize=False, trains=False
    ).model.eval()
    with torch.no_grad():
        cache = PagedCache(engine_of_gpu, 8, 4)
        graphs = StepGraphs(engine_of_gpu, cache, NoCapture(), rows=4, sequences=4, longest=64)
        step = graphs.graphs
        numbers, tables = torch.zeros(5, 4, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
        packed = step_graphs.PackedStep(
            numbers[:1], numbers[1:2], paged_cache.StepPlaces(numbers[2], [], {}, RowsCall(tables, *numbers[3:], 8)),
            [], [], {}, numbers[0, :0], None, numbers,
        )  # fmt: skip
        for _ in range(WARM + 2):
            with NothingFromHost():  # type: ignore[no-untyped-call]  # torch has no annotations there
                graphs.compute(packed, lambda states: engine_of_gpu.kernels.linear(states, engine_of_gpu.head_weight))
        assert step.captured == 1 and graphs.launched == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gqa", "window"])
def test_a_gpu_answers_the_same_with_graphs_and_without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Tokens of greedy answers; and the pool is counted."""
    monkeypatch.undo()
    network = model(MIXED[name]).to("cuda", torch.float32).eval()
    plain, graphed = (Served(network, None, cuda_graphs=graphs, compiled=True, packed=True) for graphs in ("off", "on"))
    assert graphed.answer() == plain.answer()
    graphs = graphed.engine._loop.runner.graphs
    assert graphs is not None and graphs.launched > 0 and graphs.graphs.capture.bytes > 0
