"""CUDA graphs of passes (layout.cuda_graphs): what a CPU can prove of them, and what a GPU must."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from meshwright import compat
from meshwright.data import Sequences
from meshwright.kernels.attention.varlen import borders_of
from meshwright.kernels.chooser import simulate_device
from meshwright.kernels.loss import cross_entropy
from meshwright.observe.oracle.features import shrink
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import Engine, build_engine
from meshwright.parallel.axes.data import Bucket, Replicas
from meshwright.parallel.groups.group import Group, Pending
from meshwright.parallel.groups.mesh import make_mesh
from meshwright.parallel.pipeline.pass_graphs import MOST, WARM, CudaCapture, PassGraphs, check_device
from meshwright.spec import Layout, ModelShape, Recipe
from meshwright.spec.errors import PlanError
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.rules.legal import layout_violations
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import DTYPES, LossScaler
from meshwright.training.step.batches import Batch, graph_form, split, static_copy, to_batch
from meshwright.training.step.step import MicroPass, StepResult, Weights, train_step
from tests.operation_recorder import OnDeviceOnly, Recorder

ON = Layout(cuda_graphs="on", compile="off")
CPU = torch.device("cpu")
LLAMA = shrink("llama-3.1-8b")


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss multiplies all rows: that a target is ignored decides no size."""
    monkeypatch.setattr(cross_entropy, "multiplied_rows", lambda valid, vocabulary: None)


def engine_of(
    shape: ModelShape, layout: Layout, precision: str = "fp32", micro_batches: int = 2, **more: Any
) -> Engine:  # fmt: skip
    dtype = DTYPES[precision]
    return build_engine(shape, layout, dtype=dtype, reduce_dtype=torch.float32, micro_batches=micro_batches, **more)


def recorded(engine: Engine) -> tuple[Engine, Recorder]:
    """The engine with graphs that this CPU plays."""
    recorder = Recorder(lambda: [p.grad for p in engine.parameters.values() if p.grad is not None])
    return replace(engine, graphs=PassGraphs(model=engine.model, capture=recorder, replicas=engine.replicas)), recorder


def batch_of(step: int, rows: int, sequence: int, vocab: int, *, packed: bool = False, device: str = "cpu") -> Batch:
    """Other tokens, borders and ignored targets in each step."""
    random = np.random.default_rng(step)
    tokens = random.integers(0, vocab, (rows, sequence + 1))
    targets = tokens[:, 1:].copy()
    targets[random.random(targets.shape) < 0.2] = -100
    documents = (random.random((rows, sequence)) < 0.2).cumsum(1).astype(np.int32)
    positions = np.broadcast_to(np.arange(sequence, dtype=np.int32), documents.shape)
    sequences = Sequences(
        tokens=tokens[:, :-1], targets=targets, documents=documents, positions=positions, packed=packed
    )  # fmt: skip
    return to_batch(sequences, torch.device(device), document_mask=packed)


def steps(
    engine: Engine, recipe: Recipe, number: int, *, packed: Callable[[int], bool] = lambda step: False,
    device: str = "cpu", scaler: LossScaler | None = None, rows: int = 4,
) -> Iterator[tuple[StepResult, Optimizer]]:  # fmt: skip
    engine.train()
    optimizer = Optimizer.for_engine(engine, recipe)
    for step in range(number):
        batch = batch_of(step * 7 + engine.mesh.rank, rows, 24, engine.model.shape.vocab, packed=packed(step),
                         device=device)  # fmt: skip
        yield (
            train_step(
                engine, optimizer, split(batch, 2), rate=1e-2 / (step + 1), clip=1.0, balance_loss=0.01, scaler=scaler
            ),
            optimizer,
        )


def trained(
    engine: Engine, recipe: Recipe, number: int, **more: Any
) -> tuple[list[list[float]], dict[str, Tensor]]:  # fmt: skip
    """Losses and gradient norms of all steps, and the weights behind them."""
    curve = [[float(outcome.loss), float(outcome.grad_norm), float(outcome.balance or 0)]
             for outcome, _ in steps(engine, recipe, number, **more)]  # fmt: skip
    return curve, {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}


CASES: dict[str, tuple[ModelShape, dict[str, Any], dict[str, Any]]] = {
    "dense": (LLAMA, {}, {}),
    "gpt": (shrink("gpt2-small"), {}, {"recompute": "full"}),
    "selective": (LLAMA, {}, {"recompute": "selective", "kernels": "reference"}),
    "bf16": (LLAMA, {"precision": "bf16"}, {}),
    "one micro-batch in bf16": (LLAMA, {"precision": "bf16"}, {"micro_batch": 1}),
    "fp16": (LLAMA, {"precision": "fp16"}, {}),
    "8-bit moments": (LLAMA, {"optimizer_states": "int8"}, {}),
    "muon": (LLAMA, {"optimizer": "muon"}, {}),
    "adapters": (replace(LLAMA, lora=LoRAShape(rank=4)), {}, {}),
}


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("name", CASES)
def test_repeated_operations_train_as_passes_do(name: str) -> None:
    """Bit for bit: nothing that changes between passes was left in the graph, and nothing was read by the host."""
    shape, recipe_keys, layout_keys = CASES[name]
    recipe = Recipe(global_batch=4, sequence=24, **recipe_keys)
    scalers = [LossScaler(CPU) if recipe.precision == "fp16" else None for _ in range(2)]
    rows = 2 if "micro_batch" in layout_keys else 4
    plain = engine_of(shape, Layout(compile="off", **layout_keys), recipe.precision, rows // 2)
    graphed, recorder = recorded(engine_of(shape, Layout(compile="off", **layout_keys), recipe.precision, rows // 2))
    expected = trained(plain, recipe, 6, scaler=scalers[0], rows=rows)
    curve = trained(graphed, recipe, 6, scaler=scalers[1], rows=rows)
    assert recorder.launches == 6 * rows // 2 - WARM
    assert curve[0] == expected[0]
    assert all(torch.equal(curve[1][key], value) for key, value in expected[1].items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("recompute", ["none", "all-but-attention"])
def test_compiled_passes_are_repeated_as_well(
    recompute: Literal["none", "all-but-attention"], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Code is compiled before it is captured: in the passes that run as they are. No operation of it saves a random
    state (run_and_save_rng_state), which the recorder has no rule for, and a graph none either."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    recipe, layout = Recipe(global_batch=4, sequence=24), Layout(compile="on", recompute=recompute)
    expected = trained(engine_of(LLAMA, layout), recipe, 4)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    graphed, recorder = recorded(engine_of(LLAMA, layout))
    curve = trained(graphed, recipe, 4)
    assert recorder.launches == 8 - WARM and curve[0] == expected[0]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * compiled > 0


def on_two_ranks(precision: str) -> list[tuple[list[list[float]], dict[str, Tensor]]]:
    """On one rank: what was trained without graphs and with."""
    cross_entropy.multiplied_rows = lambda valid, vocabulary: None
    layout, recipe = Layout(dp_replicate=2, compile="off"), Recipe(global_batch=8, sequence=24, precision=precision)  # type: ignore[arg-type]  # one of its words
    mesh = make_mesh(layout)
    plain, apart = (engine_of(LLAMA, layout, precision, mesh=mesh) for _ in range(2))
    graphed, recorder = recorded(apart)
    curves = [trained(plain, recipe, 4)]
    summed, start = set(), Group.start_all_reduce

    def watched(group: Group, tensor: Tensor) -> Pending:
        summed.add(tensor.data_ptr())
        return start(group, tensor)

    Group.start_all_reduce = watched  # type: ignore[method-assign]
    curves.append(trained(graphed, recipe, 4))
    assert recorder.launches == 8 - WARM and graphed.graphs is not None
    firsts = [bucket.parameters[0] for parameter in apart.replicas for bucket in parameter.buckets]
    assert summed == {graphed.graphs.gradients[parameter].data_ptr() for parameter in firsts}, (
        "where graphs leave them, uncopied"
    )
    return curves


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replicas_sum_what_graphs_leave(precision: str) -> None:
    """Behind the last pass, in one buffer of each bucket; bit for bit as sums that run beside the backward pass."""
    for plain, graphed in on_ranks(2, on_two_ranks, precision, limit_s=300):
        assert graphed[0] == plain[0]
        assert all(torch.equal(graphed[1][key], value) for key, value in plain[1].items())


@pytest.mark.usefixtures("as_on_gpus")
def test_gradients_and_weights_stay_where_they_are() -> None:
    """Over steps, an evaluation and what drops gradients: a graph would read and write other memory."""
    recipe = Recipe(global_batch=4, sequence=24, precision="bf16")
    engine, _ = recorded(engine_of(LLAMA, Layout(compile="off"), "bf16"))
    assert engine.graphs is not None
    seen = set()
    for _, optimizer in steps(engine, recipe, 5):
        assert all(p.grad is None for p in engine.parameters.values())  # of 16 bit, dropped by the optimizer
        weights = tuple(p.data_ptr() for p in engine.parameters.values())
        gradients = tuple(engine.graphs.gradients[p].data_ptr() for p in engine.parameters.values())
        states = tuple(tensor.data_ptr() for tensor in optimizer.tensors().values())
        seen.add((weights, gradients, states))
    assert len(seen) == 1 and engine.graphs.captured == 1
    buffers = {engine.graphs.gradients[p].untyped_storage().data_ptr() for p in engine.parameters.values()}
    assert len(buffers) == 1  # so that what the optimizer drops is not counted as given back


class StreamRecorder(Recorder):
    """Notes of each node of autograd that outlives a pass whether it was made on the stream that passes run on. On a
    GPU a node runs on the stream it was made on."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(lambda: [p.grad for p in self.parameters if p.grad is not None])
        self.parameters = list(parameters)
        self.at_capture: set[str] = set()

    def note(self, where: str) -> None:
        for parameter in self.parameters:  # of a node that nobody holds a new one is made, which ends with the line
            get_gradient_edge(parameter).node.metadata.setdefault("made", where)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.note("elsewhere")
        yield
        self.note("here")

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.note("elsewhere")
        nodes = [get_gradient_edge(parameter).node for parameter in self.parameters]
        self.at_capture |= {node.metadata["made"] for node in nodes if "made" in node.metadata}
        del nodes
        return super().record(work)


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("ranks", ["one rank", "replicas"])
def test_nodes_that_outlive_a_pass_are_made_on_its_stream(ranks: str) -> None:
    """What adds bf16 gradients up in fp32 is held from pass to pass. Made on the default stream it would end the
    capture of any pass."""
    recipe = Recipe(global_batch=4, sequence=24, precision="bf16")
    engine = engine_of(LLAMA, Layout(compile="off"), "bf16", micro_batches=2 if ranks == "one rank" else 1)
    if ranks == "replicas":
        parameters = list(engine.parameters.values())
        bucket = Bucket(parameters, engine.mesh["data"], torch.float32, gradients=len(parameters))
        engine = replace(engine, replicas=(Replicas([bucket]),))
    recorder = StreamRecorder(engine.parameters.values())
    engine = replace(engine, graphs=PassGraphs(model=engine.model, capture=recorder, replicas=engine.replicas))
    trained(engine, recipe, 4)
    assert recorder.launches == 8 - WARM
    assert recorder.at_capture == {"here"}


def test_a_capture_that_fails_gives_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.graph itself stays on it where the capture cannot be ended: everything later would run there."""
    current = ["default"]

    class OnStream:
        def __init__(self, stream: str) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.stream

        def __exit__(self, *failure: object) -> None:
            current[0] = self.before

    class FailingGraph:
        def capture_begin(self, *pool: object, **options: object) -> None:
            assert current == ["capture"]

        def capture_end(self) -> None:
            raise RuntimeError("operation would make the legacy stream depend on a capturing blocking stream")

    for name, stand_in in {
        "Stream": lambda device: "capture", "stream": OnStream, "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": FailingGraph, "synchronize": lambda: None, "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    with pytest.raises(RuntimeError, match="legacy stream"):
        CudaCapture(CPU).record(lambda: None)
    assert current == ["default"]


@pytest.mark.usefixtures("as_on_gpus")
def test_weights_that_were_put_elsewhere_are_captured_anew() -> None:
    recipe, layout = Recipe(global_batch=4, sequence=24), Layout(compile="off")
    plain, (graphed, recorder) = engine_of(LLAMA, layout), recorded(engine_of(LLAMA, layout))
    curves = []
    for engine in (plain, graphed):
        losses = []
        for outcome, _ in steps(engine, recipe, 8):
            losses.append(float(outcome.loss))
            if len(losses) == 4:
                for parameter in engine.parameters.values():
                    parameter.data = parameter.data.clone()
        curves.append(losses)
    assert curves[0] == curves[1] and recorder.launches == 16 - 2 * WARM


@pytest.mark.usefixtures("as_on_gpus")
def test_each_form_has_its_graph_and_there_are_only_so_many() -> None:
    """Packed and plain rows, and rows of other lengths; beyond the last a pass runs as it is."""
    engine, recorder = recorded(engine_of(LLAMA, Layout(compile="off")))
    optimizer = Optimizer.for_engine(engine, Recipe())
    assert engine.graphs is not None
    for length in range(4, 4 + MOST + 1):
        batches = [batch_of(step, 1, length, LLAMA.vocab) for step in range(WARM + 1)]
        train_step(engine, optimizer, batches, rate=0.0, clip=1.0, balance_loss=0.0)
    assert engine.graphs.captured == recorder.launches == MOST


def test_documents_have_room_in_powers_of_two() -> None:
    """Few forms serve all batches, and what is not there has no tokens."""
    batch = batch_of(0, 2, 24, 61, packed=True)
    number, longest, _ = batch.spans
    copy = static_copy(batch)
    assert copy.spans[0] >= number > copy.spans[0] / 2 and copy.spans[1] >= longest
    assert graph_form(copy) == graph_form(batch) != graph_form(replace(batch, documents=None))
    assert graph_form(replace(batch, documents_of_rows=())) is None
    assert batch.documents is not None
    exact, roomy = (borders_of(batch.documents, n) for n in (number, copy.spans[0]))
    assert torch.equal(roomy[: number + 1], exact) and bool((roomy[number:] == 48).all())


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], ModelShape, str]] = {
    "pp": ({"pp": 2}, {}, LLAMA, "layout.pp=1"),
    "tp": ({"tp": 2}, {}, LLAMA, "layout.tp=1"),
    "cp": ({"cp": 2}, {}, LLAMA, "layout.cp=1"),
    "ep": ({"ep": 2, "dp_shard": 2}, {}, shrink("qwen3-30b-a3b"), "layout.ep=1"),
    "zero": ({"dp_shard": 2, "zero": 1}, {}, LLAMA, "layout.zero=0"),
    "offload": ({"offload": "activations"}, {}, LLAMA, "layout.offload=off"),
    "attention again": ({"recompute": "selective", "kernels": "reference"}, {}, LLAMA, "layout.compile=off"),
    "attention again, all": ({"recompute": "full", "compile": "on"}, {}, LLAMA, "layout.recompute=none"),
    "dropout over documents": ({}, {"dropout": 0.1}, LLAMA, "recipe.document_mask=false"),
    "noise": ({"micro_batch": 1}, {"noise_scale_every": 2}, LLAMA, "recipe.noise_scale_every=0"),
    "pairs": ({}, {"objective": "dpo"}, LLAMA, "layout.cuda_graphs=off"),
    "a teacher": ({}, {"objective": "distill"}, LLAMA, "layout.cuda_graphs=off"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused(name: str) -> None:
    """With the option to change; and without graphs, or without what clashes, it is legal."""
    layout_keys, recipe_keys, shape, option = REFUSED[name]
    recipe = Recipe(global_batch=8, sequence=16, **recipe_keys)
    violations = layout_violations(shape, recipe, Layout(cuda_graphs="on", **layout_keys))
    assert violations and all("layout.cuda_graphs=on" in sentence and option in sentence for sentence in violations)
    assert not layout_violations(shape, recipe, Layout(**layout_keys))


def test_uncompiled_blocks_may_make_all_again() -> None:
    recipe = Recipe(global_batch=8, sequence=16)
    assert not layout_violations(LLAMA, recipe, replace(ON, recompute="full"))
    assert not layout_violations(LLAMA, recipe, replace(ON, compile="on", recompute="all-but-attention"))


def test_dropout_is_captured_with_recomputation_too() -> None:
    """Its masks follow from the keys in a batch, so no random state has to be reset."""
    recipe = Recipe(global_batch=8, sequence=16, dropout=0.1, document_mask=False)
    adapted = replace(LLAMA, lora=LoRAShape(rank=4, dropout=0.1))
    for layout in (ON, replace(ON, recompute="full")):
        assert not layout_violations(LLAMA, recipe, layout) and not layout_violations(adapted, recipe, layout)


def test_data_parallelism_alone_is_legal() -> None:
    layout = Layout(cuda_graphs="on", dp_replicate=2, dp_shard=2)
    assert not layout_violations(LLAMA, Recipe(global_batch=8, sequence=16), layout)


@pytest.mark.usefixtures("as_on_gpus")
def test_a_capture_that_fails_leaves_the_passes_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """If a driver or an operation refuses the capture, the run goes on with the same numbers and warns once."""

    class Refusing(Recorder):
        refused = 0

        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            self.refused += 1
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might ...")

    plain, engine = engine_of(LLAMA, Layout(compile="off")), engine_of(LLAMA, Layout(compile="off"))
    recorder = Refusing(list)
    graphs = PassGraphs(model=engine.model, capture=recorder, replicas=engine.replicas)
    recipe = Recipe(global_batch=4, sequence=24)
    expected = trained(plain, recipe, 4)
    curve = trained(replace(engine, graphs=graphs), recipe, 4)
    assert curve[0] == expected[0] and all(torch.equal(curve[1][key], value) for key, value in expected[1].items())
    assert (recorder.refused, graphs.captured) == (1, 0)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith("without CUDA graphs, which is slower: operation not permitted when stream is capturing")


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(PlanError, match=r"cuda_graphs=on needs a GPU.* layout.cuda_graphs=off"):
        check_device(LLAMA, ON, CPU, torch.float32)
    with pytest.raises(PlanError, match=r"needs a GPU"):
        build_engine(LLAMA, ON)
    check_device(LLAMA, Layout(), CPU, torch.float32)


def aligned(name: str) -> ModelShape:
    """A tiny shape, whose experts have rows of 16 bytes."""
    shape = shrink(name)
    return replace(shape, hidden=32, moe=shape.moe and replace(shape.moe, ffn=16))


def test_experts_need_products_that_read_their_lengths_on_the_device() -> None:
    moe = aligned("qwen3-30b-a3b")
    with simulate_device("cuda"):
        check_device(moe, ON, CPU, torch.bfloat16)
        for layout, dtype in ((ON, torch.float16), (replace(ON, kernels="reference"), torch.bfloat16)):
            with pytest.raises(PlanError, match=r"experts .* Take layout.cuda_graphs=off"):
                check_device(moe, layout, CPU, dtype)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_gpu_trains_the_same_with_graphs_and_without(compiled: Literal["off", "on"], packed: bool) -> None:
    """Five steps, bit for bit, with kernels that add up in one order."""
    device, recipe = torch.device("cuda", 0), Recipe(global_batch=4, sequence=24, precision="bf16")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    curves = []
    try:
        for graphs in ("off", "on"):
            layout = Layout(compile=compiled, cuda_graphs=graphs)
            engine = engine_of(aligned("llama-3.1-8b"), layout, "bf16", device=device)
            curves.append(trained(engine, recipe, 5, packed=lambda step: packed, device="cuda"))
            if engine.graphs is not None:
                assert engine.graphs.captured >= 1
    finally:
        torch.use_deterministic_algorithms(before)
    assert curves[0][0] == curves[1][0]
    assert all(torch.equal(curves[1][1][key], value) for key, value in curves[0][1].items())


@pytest.mark.parametrize("recompute", ["none", "selective", "all-but-attention", "full"])
@pytest.mark.parametrize(
    ("name", "packed", "recipe"),
    [
        ("llama-3.1-8b", False, {"precision": "bf16"}),
        ("llama-3.1-8b", True, {"precision": "bf16"}),
        ("llama-3.1-8b", False, {"precision": "fp16"}),
        ("mistral-7b-v0.1", True, {"precision": "bf16"}),
        ("gpt2-small", False, {"precision": "fp32"}),
        ("qwen3-30b-a3b", True, {"precision": "bf16"}),
        ("deepseek-v3", False, {"precision": "bf16"}),
    ],
)
@pytest.mark.long
def test_no_pass_of_a_gpu_waits_for_its_values(name: str, packed: bool, recipe: dict[str, Any], recompute: Any) -> None:
    """The very calls of a GPU's pass, on tensors without values."""
    shape, layout = aligned(name), replace(ON, recompute=recompute)
    with compat.fake_world(0, 1), compat.fake_tensors(), simulate_device("cuda"):
        engine = engine_of(shape, layout, **recipe, mesh=make_mesh(layout), initialize=False)
        batch = batch_of(0, 4, 24, shape.vocab, packed=packed)
        if packed:
            batch = replace(batch, documents_of_rows=((3, 20),) * 4)
        passes = [MicroPass(part, Weights(*torch.ones(4).unbind())) for part in split(batch, 1)]
        with OnDeviceOnly():  # type: ignore[no-untyped-call]  # torch has no annotations there
            engine.forward_backward(passes)
        assert engine.graphs is not None and engine.graphs.captured == 1
