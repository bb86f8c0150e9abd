"""Work that is captured once as a CUDA graph and then launched in one call: passes of training (pass_graphs.py), and
steps of a serving engine.

A graph is launched on the memory that it was captured with. So everything that changes between calls is copied into
memory of the graph's own (`Repeatable.take`). Work of another `form` has a graph of its own; all share one pool of
memory, as they run one after the other and leave in it only what `give` takes out at once.

The first WARM calls of a form run as they are: they compile, tune and load code, which may not happen while a graph is
captured. They are calls like all others, so that nothing is computed twice.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

WARM = 3
"""Calls of a form before it is captured; torch's documentation asks for a few."""
MOST = 16
"""Forms with a graph of their own; any further one runs as it is."""
Launch = Callable[[], None]


class Repeatable(Protocol):
    """What can be captured. All that it reads and finds is in tensors, or part of its form."""

    def form(self) -> Hashable:
        """Work of one form launches the same kernels on tensors of the same sizes; None = not to be captured."""

    def standing(self) -> Self:
        """The same with memory of its own, which stays where it is."""

    def take(self, one: Self) -> None:
        """Copy what another one of this form reads into the memory of this one."""

    def give(self, one: Self) -> None:
        """Hand what was found to that one, as copies, or in memory that is its own until the next call."""


class Capture(Protocol):
    """What records and repeats work of the device."""

    @property
    def bytes(self) -> int:
        """Of the pool of memory that graphs have taken so far."""

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

    @property
    def bytes(self) -> int:
        """By the allocator's own list of segments, which lasts some milliseconds."""
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(self.pool))

    def beside(self) -> AbstractContextManager[None]:
        """On that stream, behind what the current one was given; this goes on behind it."""
        return _OnStream(self.stream)

    def places(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """As Capture."""
        return tuple(tensor.data_ptr() for tensor in tensors)

    def record(self, work: Callable[[], None]) -> Launch:
        """Calls of other threads, such as the one that reads batches, are no part of it and do not end it. The stream
        is entered here as well: where a capture fails, torch.cuda.graph leaves the process on it (torch 2.11 to
        2.13)."""
        graph = torch.cuda.CUDAGraph()
        capturing = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        with torch.cuda.stream(self.stream), capturing:
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

    bytes = 0
    """It has no pool."""

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


Work = TypeVar("Work", bound=Repeatable)


@dataclass(slots=True)
class _Form(Generic[Work]):
    """What is known of work of one form."""

    seen: int = 0
    standing: Work | None = None
    launch: Launch | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class FormGraphs(Generic[Work]):
    """A graph for each form of some work."""

    capture: Capture
    most: int = MOST
    """Forms that have one."""
    _forms: dict[Hashable, _Form[Work]] = field(init=False, default_factory=dict)
    _places: tuple[int, ...] = field(init=False, default=())
    """Addresses of what all graphs read, when they were captured."""

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return sum(form.launch is not None for form in self._forms.values())

    def read(self, tensors: Iterable[Tensor]) -> None:
        """Say where these are, which all graphs read: if they were put elsewhere, graphs read memory that is no more,
        and are captured anew."""
        places = self.capture.places(list(tensors))
        if places != self._places:
            self._places = places
            self._forms.clear()

    def prepare(self, one: Work, work: Callable[[Work], None]) -> None:
        """Capture work of this form now, behind one call of it that runs as it is."""
        key = one.form()
        form = self._forms.setdefault(key, _Form())
        if form.launch is not None or key is None or self.captured >= self.most:
            return
        with self.capture.beside():
            work(one)
        form.standing, form.launch = self._captured(one, work)

    def call(self, one: Work, work: Callable[[Work], None]) -> bool:
        """Do the work on `one`. Whether a graph did it."""
        key = one.form()
        form = self._forms.setdefault(key, _Form()) if key is not None else _Form()
        form.seen += 1
        if form.launch is None and form.seen > WARM and self.captured < self.most and key is not None:
            form.standing, form.launch = self._captured(one, work)
        if form.launch is None or form.standing is None:
            with self.capture.beside():
                work(one)
            return False
        form.standing.take(one)
        form.launch()
        form.standing.give(one)
        return True

    def _captured(self, one: Work, work: Callable[[Work], None]) -> tuple[Work | None, Launch | None]:
        standing = one.standing()
        standing.take(one)
        return standing, self.capture.record(lambda: work(standing))
