"""CUDA graphs (layout.cuda_graphs): a micro-batch's forward and backward pass, captured once and then launched in one
call. For models so small that the host launches kernels slower than the device runs them.

A graph is launched on the memory that it was captured with. So everything that changes between micro-batches is copied
into memory of the graph's own pass (`Capturable.take`), gradients are added to buffers that stay where they are, and
the parameters are updated in place. Passes of another `form` (other sizes, with documents or without) have a graph of
their own; all share one pool of memory, as they run one after the other and leave in it only what `give` takes out
at once.

The first WARM passes of a form run as they are: they compile, tune and load code, which may not happen while a graph is
captured. They are passes of the run like all others, so that nothing is computed twice.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from meshwright.kernels import choose
from meshwright.kernels.experts import keeps_counts
from meshwright.kernels.gradient_sums import gradient_dtype
from meshwright.kernels.target import acts
from meshwright.model import Transformer
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.passes import Pass
from meshwright.parallel.replicas import Bucket, Replicas
from meshwright.spec.errors import PlanError
from meshwright.spec.layout import Layout
from meshwright.spec.shape import ModelShape

WARM = 3
"""Passes of a form before it is captured; torch's documentation asks for a few."""
MOST = 16
"""Forms with a graph of their own; any further one runs as it is."""
Launch = Callable[[], None]


class Capturable(Pass, Protocol):
    """A pass that can be captured. All that it reads and finds is in tensors, or part of its form."""

    def form(self) -> Hashable:
        """Passes of one form launch the same kernels on tensors of the same sizes; None = not to be captured."""

    def standing(self) -> Self:
        """The same pass with memory of its own, which stays where it is."""

    def take(self, one: Self) -> None:
        """Copy what another pass of this form reads into the memory of this one."""

    def give(self, one: Self) -> None:
        """Hand what was found to that pass, as copies."""


class Capture(Protocol):
    """What records and repeats work of the device."""

    def beside(self) -> AbstractContextManager[None]:
        """Where passes run that are not captured, as those that are."""

    def places(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Their addresses."""

    def record(self, work: Callable[[], None]) -> Launch:
        """Record the work, without doing it -> what does it, in the same memory."""


class CudaCapture:
    """torch.cuda.graph, on a stream of its own, as torch's documentation shows it for whole networks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def beside(self) -> AbstractContextManager[None]:
        """On that stream, behind what the current one was given; this goes on behind it."""
        return _OnStream(self.stream)

    def places(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """As Capture."""
        return tuple(tensor.data_ptr() for tensor in tensors)

    def record(self, work: Callable[[], None]) -> Launch:
        """Calls of other threads, such as the one that reads batches, are no part of it and do not end it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


class _OnStream(AbstractContextManager[None]):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.inside = stream, torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self.outer = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(self.outer)
        self.inside.__enter__()

    def __exit__(self, *failure: object) -> None:
        self.inside.__exit__(*failure)
        self.outer.wait_stream(self.stream)


class NoCapture:
    """Where there is no GPU: a dry run, whose passes all run as they are."""

    def beside(self) -> AbstractContextManager[None]:
        """Here."""
        return nullcontext()

    def places(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """None: tensors without values have no addresses."""
        return ()

    def record(self, work: Callable[[], None]) -> Launch:
        """The work itself."""

        def launch() -> None:
            with self.beside():
                work()

        return launch


@dataclass(slots=True)
class _Form:
    """What is known of passes of one form."""

    seen: int = 0
    standing: "Capturable | None" = None
    launch: Launch | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class PassGraphs:
    """The passes of a model without a pipeline, as graphs."""

    model: Transformer
    capture: Capture
    replicas: Sequence[Replicas] = ()
    gradients: dict[nn.Parameter, Tensor] = field(init=False, default_factory=dict)
    """Of each parameter, where all graphs add to."""
    _buffers: list[Tensor] = field(init=False, default_factory=list)
    """What those are views of: of every bucket, then of gradients without one."""
    _forms: dict[Hashable, _Form] = field(init=False, default_factory=dict)
    _places: tuple[int, ...] = field(init=False, default=())
    """Addresses of parameters and buffers when graphs were captured."""

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return sum(form.launch is not None for form in self._forms.values())

    def run(self, passes: Iterable[Capturable]) -> None:
        """Every micro-batch of a step. Gradients are summed over replicas by who called."""
        self._begin()
        for one in passes:
            self._run(one)

    def _begin(self) -> None:
        """Gradients of zero, at their places: who reads them may have let go of them."""
        if not self.gradients:
            self._lay()
        for buffer in self._buffers:
            buffer.zero_()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        for bucket, buffer in zip(self._buckets(), self._buffers, strict=False):
            bucket.buffer = buffer
        places = self.capture.places([*self.model.parameters(), *self.model.buffers()])
        if places != self._places:  # weights that were put elsewhere: the graphs read memory that is no more
            self._places = places
            self._forms.clear()

    def _lay(self) -> None:
        """Gradients lie one behind the other: those that are summed in one call, and the others."""
        for bucket in self._buckets():
            self._side_by_side(bucket.parameters, bucket.dtype)
        held = [p for p in self.model.parameters() if p.requires_grad and p not in self.gradients]
        for dtype in dict.fromkeys(map(gradient_dtype, held)):
            self._side_by_side([p for p in held if gradient_dtype(p) == dtype], dtype)

    def _buckets(self) -> list[Bucket]:
        return [bucket for one in self.replicas for bucket in one.buckets]

    def _side_by_side(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
        for parameter, part in zip(parameters, buffer.split(sizes), strict=True):
            self.gradients[parameter] = part.view_as(parameter)
        self._buffers.append(buffer)

    def _run(self, one: Capturable) -> None:
        key = one.form()
        form = self._forms.setdefault(key, _Form()) if key is not None else _Form()
        form.seen += 1
        if form.launch is None and form.seen > WARM and self.captured < MOST and key is not None:
            form.standing, form.launch = self._captured(one)
        if form.launch is None or form.standing is None:
            with self.capture.beside():
                self._pass(one)
            return
        form.standing.take(one)
        form.launch()
        form.standing.give(one)

    def _captured(self, one: Capturable) -> tuple[Capturable, Launch]:
        standing = one.standing()
        return standing, self.capture.record(lambda: self._pass(standing))

    def _pass(self, one: Pass) -> None:
        _, loss = one(self.model, None)
        loss.backward()


def pass_graphs(
    model: Transformer, mesh: Mesh, device: torch.device, replicas: Sequence[Replicas]
) -> PassGraphs | None:  # fmt: skip
    """Of a model that is laid out, where its layout has them. PlanError where the device cannot."""
    if mesh.layout.cuda_graphs == "off":
        return None
    check_device(model.shape, mesh.layout, device, next(model.parameters()).dtype)
    capture = CudaCapture(device) if device.type == "cuda" else NoCapture()
    return PassGraphs(model=model, capture=capture, replicas=replicas)


def check_device(shape: ModelShape, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
    """PlanError where layout.cuda_graphs=on is for a device that has none, or for experts whose products have the host
    wait for the lengths of their runs. What no device can capture is refused before (spec.legal)."""
    if layout.cuda_graphs == "off":
        return
    kind = acts() or device.type
    if kind != "cuda":
        raise PlanError(f"layout.cuda_graphs=on needs a GPU, and this is a {kind}: take layout.cuda_graphs=off")
    if shape.moe and not counts_stay(shape, layout.kernels, device, dtype):
        raise PlanError(
            "layout.cuda_graphs=on cannot capture experts here, whose products wait for the lengths of their runs: "
            "take layout.cuda_graphs=off, or recipe.precision=bf16 on a GPU of compute capability 9.0"
        )


def counts_stay(shape: ModelShape, kernels: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all products of experts read on the device how many rows each expert has."""
    moe, lora = shape.moe, shape.lora
    assert moe is not None
    if kernels == "reference":
        return False
    pairs = [(moe.ffn, shape.hidden)]
    pairs += [(lora.rank, shape.hidden), (lora.rank, moe.ffn)] if lora else []
    prefer = choose(kernels).prefer
    return all(
        keeps_counts(torch.empty(1, width, dtype=dtype, device=device),
                     torch.empty(1, height, width, dtype=dtype, device=device), prefer)
        for height, width in pairs
    )  # fmt: skip
