"""CUDA graphs: work that is captured once and then launched in one call, and the passes of training that are.

A graph serves a pass of training, or a step of a serving engine. A graph always works on the memory that it
was captured with. So everything that changes between calls is copied into the graph's memory (`Repeatable.take`). Work
of another `form` has another graph. All share one pool of memory: they run one after the other, and `give` takes their
outputs out at once.

The first WARM calls of a form run uncaptured: they compile, tune and load code, which may not happen during a capture.
They are ordinary calls, so nothing is computed twice.

Passes of training (layout.cuda_graphs) are captured for models so small that the host launches kernels slower than the
device runs them. Gradients are added to buffers at fixed addresses, and parameters are updated in place. Passes of
another `form` have other sizes, or differ in having documents.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels, choose
from meshwright.kernels.chooser import simulated_kind
from meshwright.kernels.experts.experts import keeps_counts
from meshwright.kernels.linear.weight_gradients import gradient_dtype, sum_of
from meshwright.model import Transformer
from meshwright.parallel.axes.data import Bucket, Replicas
from meshwright.parallel.groups.mesh import Mesh
from meshwright.parallel.pipeline.passes import Pass
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape

WARM = 3
"""Calls of a form before it is captured. torch's documentation asks for a few."""
MOST = 16
"""Forms that get a graph. Any further one runs uncaptured."""
Launch = Callable[[], None]


class Repeatable(Protocol):
    """Work that can be captured. All its inputs and outputs are tensors, or part of its form."""

    def form(self) -> Hashable:
        """Return a key of the kernels that are launched and the sizes of their tensors. None = not to be captured."""

    def static_copy(self) -> Self:
        """Return the same work with memory of its own, at fixed addresses."""

    def take(self, call: Self) -> None:
        """Copy the inputs of a call of this form into this memory."""

    def give(self, call: Self) -> None:
        """Hand the outputs to a call, as copies or in memory that is valid until the next call."""


class Capture(Protocol):
    """Recorder of the device's work."""

    @property
    def bytes(self) -> int:
        """Bytes that the graphs have taken from the pool so far."""

    def beside(self) -> AbstractContextManager[None]:
        """Return a context in which uncaptured work runs on the stream of the captured work."""

    def places(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the addresses of tensors."""

    def record(self, work: Callable[[], None]) -> Launch:
        """Record the work without running it, and return a function that runs it in the same memory."""


class CudaCapture:
    """torch.cuda.graph on a separate stream, as torch's documentation shows it for whole networks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    @property
    def bytes(self) -> int:
        """Bytes of the pool, from the allocator's list of segments. Takes some milliseconds."""
        segments = torch.cuda.memory_snapshot()
        return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) == tuple(self.pool))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run on the capturing stream inside, which joins the current stream on entry and on exit."""
        outer = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outer.wait_stream(self.stream)

    def places(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the addresses of tensors."""
        return tuple(tensor.data_ptr() for tensor in tensors)

    def record(self, work: Callable[[], None]) -> Launch:
        """Record the work. Calls of other threads, such as the reader of batches, are not recorded and do no harm.

        The stream is entered here as well: if a capture fails, torch.cuda.graph leaves the process on it (torch 2.11 to
        2.13).
        """
        graph = torch.cuda.CUDAGraph()
        capturing = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        with torch.cuda.stream(self.stream), capturing:
            work()
        return graph.replay


class NoCapture:
    """Stand-in without a GPU: in a dry run all passes run uncaptured."""

    bytes = 0
    """There is no pool."""

    def beside(self) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    def places(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return nothing: tensors without values have no addresses."""
        return ()

    def record(self, work: Callable[[], None]) -> Launch:
        """Return the work itself."""

        def launch() -> None:
            with self.beside():
                work()

        return launch


Work = TypeVar("Work", bound=Repeatable)


@dataclass(slots=True)
class _Form(Generic[Work]):
    seen: int = 0
    static: Work | None = None
    launch: Launch | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class FormGraphs(Generic[Work]):
    """Graphs of work, one for each form."""

    capture: Capture
    most: int = MOST
    """Number of forms that get a graph."""
    _forms: dict[Hashable, _Form[Work]] = field(init=False, default_factory=dict)
    _places: tuple[int, ...] = field(init=False, default=())
    """Addresses of the tensors that all graphs read, at the time of capture."""

    @property
    def captured(self) -> int:
        """Number of graphs."""
        return sum(form.launch is not None for form in self._forms.values())

    def read(self, tensors: Iterable[Tensor]) -> None:
        """Name the tensors that all graphs read. If they have moved, all graphs are captured anew."""
        places = self.capture.places(list(tensors))
        if places != self._places:
            self._places = places
            self._forms.clear()

    def prepare(self, call: Work, work: Callable[[Work], None]) -> None:
        """Capture work of this form now, after one uncaptured call."""
        key = call.form()
        form = self._forms.setdefault(key, _Form())
        if form.launch is not None or key is None or self.captured >= self.most:
            return
        # A capture must not compile or load code, which the first run of a kernel does.
        with self.capture.beside():
            work(call)
        form.static, form.launch = self._capture(call, work)

    def call(self, call: Work, work: Callable[[Work], None]) -> bool:
        """Do the work and return whether a graph did it."""
        key = call.form()
        form = self._forms.setdefault(key, _Form()) if key is not None else _Form()
        form.seen += 1
        if form.launch is None and form.seen > WARM and self.captured < self.most and key is not None:
            form.static, form.launch = self._capture(call, work)
        if form.launch is None or form.static is None:
            with self.capture.beside():
                work(call)
            return False
        # The graph knows only its own addresses: copy the inputs there, and the outputs out again.
        form.static.take(call)
        form.launch()
        form.static.give(call)
        return True

    def _capture(self, call: Work, work: Callable[[Work], None]) -> tuple[Work | None, Launch | None]:
        static = call.static_copy()
        static.take(call)
        return static, self.capture.record(lambda: work(static))


_log = logging.getLogger("meshwright")


class Capturable(Pass, Repeatable, Protocol):
    """A pass that can be captured."""


@dataclass(slots=True, kw_only=True, eq=False)
class PassGraphs(FormGraphs[Capturable]):
    """The passes of a model without a pipeline, as graphs."""

    model: Transformer
    replicas: Sequence[Replicas] = ()
    gradients: dict[nn.Parameter, Tensor] = field(init=False, default_factory=dict)
    """Gradient of each parameter, to which all graphs add."""
    _buffers: list[Tensor] = field(init=False, default_factory=list)
    """Memory of the gradients: of every bucket, then of gradients without one."""

    def run(self, passes: Iterable[Capturable]) -> None:
        """Run every micro-batch of a step. The caller sums gradients over replicas."""
        self._begin()
        for micro_pass in passes:
            self.call(micro_pass, self._pass)

    def _begin(self) -> None:
        """Zero the gradients and attach them again: whoever reads them may have detached them."""
        if not self.gradients:
            self._lay_out()
        for buffer in self._buffers:
            buffer.zero_()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        # Buffers of buckets come first; those behind them belong to gradients without one.
        for bucket, buffer in zip(self._buckets(), self._buffers, strict=False):
            bucket.buffer = buffer
        self.read([*self.model.parameters(), *self.model.buffers()])

    def _lay_out(self) -> None:
        """Lay gradients out one behind the other: those of each bucket, then the others by dtype."""
        for bucket in self._buckets():
            self._side_by_side(bucket.parameters, bucket.dtype)
        held = [p for p in self.model.parameters() if p.requires_grad and p not in self.gradients]
        for dtype in dict.fromkeys(map(gradient_dtype, held)):
            self._side_by_side([p for p in held if gradient_dtype(p) == dtype], dtype)
        # Autograd must add gradients on the stream of the captures: CUDA refuses a capture that waits for another
        # stream.
        with self.capture.beside():
            for gradient_sum in filter(None, map(sum_of, self.gradients)):
                gradient_sum.move_to_current_stream()

    def _buckets(self) -> list[Bucket]:
        return [bucket for replicas in self.replicas for bucket in replicas.buckets]

    def _side_by_side(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
        for parameter, part in zip(parameters, buffer.split(sizes), strict=True):
            self.gradients[parameter] = part.view_as(parameter)
        self._buffers.append(buffer)

    def _capture(self, call: Capturable, work: Callable[[Capturable], None]) -> tuple[Capturable | None, Launch | None]:
        """Capture work. Return nothing if the device cannot: passes then run without graphs, and none is lost."""
        try:
            return FormGraphs._capture(self, call, work)
        except RuntimeError as error:
            self.most = 0
            reason = str(error).partition("\n")[0]
            _log.warning("meshwright: note: passes run without CUDA graphs, which is slower: %s", reason)
            return None, None

    def _pass(self, micro_pass: Pass) -> None:
        _, loss = micro_pass(self.model, None)
        loss.backward()


def pass_graphs(
    model: Transformer, mesh: Mesh, device: torch.device, replicas: Sequence[Replicas]
) -> PassGraphs | None:  # fmt: skip
    """Return the graphs of a laid-out model, if its layout asks for them. Raises PlanError when the device cannot."""
    if mesh.layout.cuda_graphs != "on":
        return None
    check_device(model.shape, mesh.layout, device, next(model.parameters()).dtype)
    capture = CudaCapture(device) if device.type == "cuda" else NoCapture()
    return PassGraphs(model=model, capture=capture, replicas=replicas)


def check_device(shape: ModelShape, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
    """Raise PlanError when layout.cuda_graphs=on cannot work on a device.

    The device may have no CUDA graphs, or experts' products may have the host wait for the lengths of their runs.
    Settings that no device can capture are refused earlier (spec/rules/legal.py).
    """
    if layout.cuda_graphs != "on":
        return
    kind = simulated_kind() or device.type
    if kind != "cuda":
        raise PlanError(f"layout.cuda_graphs=on needs a GPU, and this is a {kind}: take layout.cuda_graphs=off")
    if shape.moe and not counts_stay(shape, layout.kernels, device, dtype):
        raise PlanError(
            "layout.cuda_graphs=on cannot capture experts here: their products wait for the host. Take "
            "layout.cuda_graphs=off, or recipe.precision=bf16 on a GPU of compute capability 9.0"
        )


def counts_stay(shape: ModelShape, kernels: str | Kernels, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether all products of experts read each expert's rows on the device. `kernels`: or their name."""
    moe, lora = shape.moe, shape.lora
    assert moe is not None
    chosen = choose(kernels) if isinstance(kernels, str) else kernels
    if chosen.name == "reference":
        return False
    # All sizes of experts' products: their matrices, then the two factors of an adapter.
    pairs = [(moe.ffn, shape.hidden)]
    pairs += [(lora.rank, shape.hidden), (lora.rank, moe.ffn)] if lora else []
    return all(
        keeps_counts(torch.empty(1, width, dtype=dtype, device=device),
                     torch.empty(1, height, width, dtype=dtype, device=device), chosen.prefer)
        for height, width in pairs
    )  # fmt: skip
