"""Work that is captured once as a CUDA graph and then launched in one call.

It serves passes of training (pass_graphs.py) and steps of a serving engine. A graph always works on the memory that it
was captured with. So everything that changes between calls is copied into the graph's memory (`Repeatable.take`). Work
of another `form` has another graph. All share one pool of memory: they run one after the other, and `give` takes their
outputs out at once.

The first WARM calls of a form run uncaptured: they compile, tune and load code, which may not happen during a capture.
They are ordinary calls, so nothing is computed twice.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

WARM = 3
"""Calls of a form before it is captured. torch's documentation asks for a few."""
MOST = 16
"""Forms that get a graph. Any further one runs uncaptured."""
Launch = Callable[[], None]


class Repeatable(Protocol):
    """Work that can be captured. All its inputs and outputs are tensors, or part of its form."""

    def form(self) -> Hashable:
        """Return a key of the kernels that are launched and the sizes of their tensors. None = not to be captured."""

    def standing(self) -> Self:
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
    standing: Work | None = None
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
        form.standing, form.launch = self._capture(call, work)

    def call(self, call: Work, work: Callable[[Work], None]) -> bool:
        """Do the work and return whether a graph did it."""
        key = call.form()
        form = self._forms.setdefault(key, _Form()) if key is not None else _Form()
        form.seen += 1
        if form.launch is None and form.seen > WARM and self.captured < self.most and key is not None:
            form.standing, form.launch = self._capture(call, work)
        if form.launch is None or form.standing is None:
            with self.capture.beside():
                work(call)
            return False
        # The graph knows only its own addresses: copy the inputs there, and the outputs out again.
        form.standing.take(call)
        form.launch()
        form.standing.give(call)
        return True

    def _capture(self, call: Work, work: Callable[[Work], None]) -> tuple[Work | None, Launch | None]:
        standing = call.standing()
        standing.take(call)
        return standing, self.capture.record(lambda: work(standing))
