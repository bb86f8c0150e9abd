"""CUDA graphs of an engine's steps (parallel/graph_capture.py): for models whose kernels run shorter than the host
launches them.

A step has a graph where all its rows are attended one by one: one token of each answer that grows, guesses, ends of
prompts. Numbers of rows are rounded up to a few (spec/graph_sizes.py), and so is the number of positions that rows see
at most, by which the attention kernel is launched. Rows beyond the step's own are written to the block that nobody
reads, and their logits are dropped. Steps with chunks of prompts, or with rows of adapters, run as they are.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Self, final

import torch
from torch import Tensor

from meshwright.kernels.paged_attention import RowsCall
from meshwright.model.quantized_weights import QuantizedWeight
from meshwright.model.transformer import Transformer
from meshwright.parallel.graph_capture import Capture, CudaCapture, FormGraphs
from meshwright.parallel.pass_graphs import counts_stay
from meshwright.serve.engine_options import Graphs
from meshwright.serve.packed_step import PackedStep
from meshwright.serve.paged_cache import PagedCache, StepPlaces
from meshwright.spec.errors import ArgumentError
from meshwright.spec.graph_sizes import position_numbers, row_numbers
from meshwright.spec.units import gib

NUMBERS = 5
"""Of a row: PackedStep.numbers."""
SECONDS_BETWEEN = 5.0
"""Lines for people while graphs are captured."""


@final
class StepMemory:
    """Where all graphs of an engine read their rows and leave logits; they run one after the other."""

    def __init__(self, rows: int, blocks: int, vocab: int, device: torch.device) -> None:
        """Of steps with at most so many rows, whose sequences hold so many blocks in all."""
        self.numbers = torch.zeros(NUMBERS, rows, dtype=torch.int64, device=device)
        self.tables = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.logits = torch.empty(rows, vocab, dtype=torch.float32, device=device)

    @staticmethod
    def bytes_of(rows: int, blocks: int, vocab: int) -> int:
        """Return the bytes of such memory."""
        return 8 * (NUMBERS * rows + blocks) + 4 * rows * vocab

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return self.numbers.nbytes + self.tables.nbytes + self.logits.nbytes


@dataclass(slots=True, eq=False)
class RowStep:
    """A step whose rows are all attended one by one. As Repeatable."""

    numbers: Tensor
    """(5, R): as PackedStep."""
    tables: Tensor
    """(all,): as RowsCall."""
    longest: int
    """Positions that a row sees at most, one of the numbers of them."""
    memory: StepMemory
    stands: bool = False
    """Whether its tensors are those of the memory."""
    logits: Tensor | None = None
    """(R, V) fp32, what is found; in the memory where a graph has found it."""

    def form(self) -> Hashable:
        """Rows and positions; None where the memory has no room for the tables."""
        return (self.numbers.shape[1], self.longest) if len(self.tables) <= len(self.memory.tables) else None

    def standing(self) -> Self:
        """In the memory."""
        rows = self.numbers.shape[1]
        numbers, logits = self.memory.numbers[:, :rows], self.memory.logits[:rows]
        return replace(self, numbers=numbers, tables=self.memory.tables, stands=True, logits=logits)

    def take(self, one: Self) -> None:
        """Tables beyond those of the step stay what they were: no row looks there."""
        self.numbers.copy_(one.numbers)
        self.tables[: len(one.tables)].copy_(one.tables)

    def give(self, one: Self) -> None:
        """They stay what they are until the next step."""
        one.logits = self.logits

    @property
    def places(self) -> StepPlaces:
        """Of its rows."""
        return StepPlaces(
            self.numbers[2], [], {}, RowsCall(self.tables, self.numbers[3], self.numbers[4], self.longest)
        )  # fmt: skip

    def found(self, logits: Tensor) -> None:
        """Keep (R, V) in any dtype."""
        if self.stands:
            assert self.logits is not None
            self.logits.copy_(logits)
        else:
            self.logits = logits.float()


@final
class StepGraphs:
    """The graphs of one engine. Use under `torch.no_grad`."""

    def __init__(
        self, model: Transformer, cache: PagedCache, capture: Capture, *, rows: int, sequences: int, longest: int
    ) -> None:
        """Of steps with at most so many rows of at most so many sequences, of `longest` positions at most."""
        self._model, self._cache = model, cache
        self.rows, self.positions = row_numbers(rows), position_numbers(longest)
        blocks = 1 + sequences * -(-longest // cache.size)
        self._memory = StepMemory(self.rows[-1], blocks, model.shape.vocab, cache.device)
        self.graphs: FormGraphs[RowStep] = FormGraphs(capture=capture, most=len(self.rows) * len(self.positions))
        self._weights = [*model.parameters(), *model.buffers()]
        self.launched = 0
        """Steps that a graph has computed."""
        self._told = 0

    @property
    def bytes(self) -> int:
        """Of the pool of all graphs, and of what they read and leave beside it."""
        return self._memory.bytes + self.graphs.capture.bytes

    def padded(self, rows: int) -> int:
        """The number of rows that a step of so many has in a graph; 0 = none has so many."""
        return next((size for size in self.rows if size >= rows), 0)

    def capture_all(self, head: Callable[[Tensor], Tensor], say: Callable[[str], None]) -> None:
        """Capture a graph for every number of rows and positions, the largest first, so that all share its memory.

        Each step runs once as it is: its kernels are compiled and loaded then, which no capture may do.
        """
        forms = [(rows, positions) for rows in reversed(self.rows) for positions in reversed(self.positions)]
        begun = monotonic()
        for done, (rows, positions) in enumerate(forms):
            if not done or monotonic() - begun > SECONDS_BETWEEN * (1 + self._told):
                self._told += bool(done)
                say(f"CUDA graphs: {done} of {len(forms)} are captured")
            numbers = torch.zeros(NUMBERS, rows, dtype=torch.int64, device=self._cache.device)
            numbers[2] = self._cache.unread * self._cache.size
            step = RowStep(numbers, self._memory.tables[:1], positions, self._memory)
            if not done:  # the first step joins matrices: where weights lie is final behind it
                with self.graphs.capture.beside():
                    self._work(head)(step)
                self.graphs.read(self._weights)
            self.graphs.prepare(step, self._work(head))
        say(f"CUDA graphs: {len(forms)} are captured, in {monotonic() - begun:.0f} s and {gib(self.bytes)}")

    def compute(self, step: PackedStep, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits (R, V) fp32 behind all rows of a step that `padded` has made so many. They are overwritten by the
        next. `head`: hidden states (R, D) -> logits."""
        assert step.numbers is not None and step.places.rows is not None
        longest = next(one for one in self.positions if one >= step.places.rows.longest)
        given = RowStep(step.numbers, step.places.rows.tables, longest, self._memory)
        self.graphs.read(self._weights)
        self.launched += self.graphs.call(given, self._work(head))
        assert given.logits is not None
        return given.logits

    def _work(self, head: Callable[[Tensor], Tensor]) -> Callable[[RowStep], None]:
        def work(one: RowStep) -> None:
            cache = self._cache.at(one.places)
            x, _ = self._model.hidden(one.numbers[:1], positions=one.numbers[1:2], cache=cache)
            one.found(head(x[0]))

        return work


def reason_without(model: Transformer, cache: PagedCache, ranks: int) -> str:
    """Why steps of a model cannot be CUDA graphs; empty where they can. `ranks`: that compute it together."""
    weight = model.embed.weight
    if weight.device.type != "cuda":
        return f"graphs are for a GPU, and this is a {weight.device.type}"
    if ranks > 1:
        return f"{ranks} ranks exchange parts in each layer, which is not captured"
    if not cache.by_rows:
        return f"attention of rows that decode is by {cache.attention}"
    coded = [one for one in model.modules() if isinstance(one, QuantizedWeight)]
    if any(one.scheme.outliers == "threshold" for one in coded):
        return "which columns of a step are outliers is read from the device"
    if any(len(one.size) > 2 for one in coded):
        return "products of quantized experts wait for the lengths of their runs"
    if model.shape.moe and not counts_stay(model.shape, model.kernels, weight.device, weight.dtype):
        return "products of experts wait for the lengths of their runs"
    return ""


def step_graphs(
    model: Transformer, cache: PagedCache, wanted: Graphs, *, ranks: int, rows: int, sequences: int, longest: int
) -> tuple[StepGraphs | None, str]:
    """The graphs of an engine, and a sentence about them. ArgumentError where they are wanted and cannot be."""
    if wanted == "off":
        return None, "off (cuda_graphs=off)"
    reason = reason_without(model, cache, ranks)
    if reason:
        if wanted == "on":
            raise ArgumentError(f"cuda_graphs=on cannot be: {reason}; take cuda_graphs=auto or off")
        return None, f"off ({reason})"
    found = StepGraphs(
        model, cache, CudaCapture(cache.device), rows=rows, sequences=sequences, longest=longest
    )  # fmt: skip
    return found, f"on, captured at the start (rows: {', '.join(map(str, found.rows))})"
