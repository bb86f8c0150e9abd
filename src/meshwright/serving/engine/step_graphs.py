"""CUDA graphs of an engine's steps, for kernels that run shorter than their launches (pass_graphs.py).

A step has a graph if all its rows are attended one by one: one token of each growing answer, guesses, ends of prompts.
Numbers of rows are rounded up to a few (spec/plan/execution.py). So is the largest number of positions that
rows see, by which the attention kernel is launched. Extra rows are written to the block that nobody reads, and their
logits are dropped. Steps with chunks of prompts, or with rows of adapters, run without graphs.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Self, final

import torch
from torch import Tensor

from meshwright.kernels.attention.paged import RowsCall
from meshwright.model.quantized_weights import QuantizedWeight
from meshwright.model.transformer import Transformer
from meshwright.parallel.pipeline.pass_graphs import Capture, CudaCapture, FormGraphs, counts_stay
from meshwright.serving.engine.cache.paged_cache import PagedCache, StepPlaces
from meshwright.serving.engine.engine_options import Graphs
from meshwright.serving.engine.rows.packed_step import PackedStep
from meshwright.spec.errors import ArgumentError, argument
from meshwright.spec.plan.execution import position_numbers, row_numbers
from meshwright.spec.units import gib

NUMBERS = 5
"""Numbers per row in PackedStep.numbers."""
SECONDS_BETWEEN = 5.0
"""Seconds between progress lines while graphs are captured."""


@final
class StepMemory:
    """Memory from which all graphs of an engine read rows, and where they leave logits. They run one at a time."""

    def __init__(self, rows: int, blocks: int, vocab: int, device: torch.device) -> None:
        """Allocate for steps of at most `rows` rows, whose sequences hold `blocks` blocks in all."""
        self.numbers = torch.zeros(NUMBERS, rows, dtype=torch.int64, device=device)
        self.tables = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.logits = torch.empty(rows, vocab, dtype=torch.float32, device=device)

    @staticmethod
    def bytes_of(rows: int, blocks: int, vocab: int) -> int:
        """Return the number of bytes of such memory."""
        return 8 * (NUMBERS * rows + blocks) + 4 * rows * vocab

    @property
    def bytes(self) -> int:
        """Bytes of all of it."""
        return self.numbers.nbytes + self.tables.nbytes + self.logits.nbytes


@dataclass(slots=True, eq=False)
class RowStep:
    """A step whose rows are all attended one by one. See Repeatable."""

    numbers: Tensor
    """(5, R); see PackedStep."""
    tables: Tensor
    """(all,); see RowsCall."""
    longest: int
    """Positions that a row sees at most, rounded up to one of the graphs' numbers."""
    memory: StepMemory
    is_standing: bool = False
    """True when its tensors are those of the memory."""
    logits: Tensor | None = None
    """(R, V) fp32, in the memory if a graph computed them."""

    def form(self) -> Hashable:
        """Return (rows, positions). None = the memory has no room for the tables."""
        return (self.numbers.shape[1], self.longest) if len(self.tables) <= len(self.memory.tables) else None

    def static_copy(self) -> Self:
        """Return the step with tensors in the memory."""
        rows = self.numbers.shape[1]
        numbers, logits = self.memory.numbers[:, :rows], self.memory.logits[:rows]
        return replace(self, numbers=numbers, tables=self.memory.tables, is_standing=True, logits=logits)

    def take(self, source: Self) -> None:
        """Copy a step. Table entries beyond it keep old content that no row reads."""
        self.numbers.copy_(source.numbers)
        self.tables[: len(source.tables)].copy_(source.tables)

    def give(self, target: Self) -> None:
        """Hand out the logits, which stay valid until the next step."""
        target.logits = self.logits

    @property
    def places(self) -> StepPlaces:
        """Places of its rows."""
        return StepPlaces(
            self.numbers[2], [], {}, RowsCall(self.tables, self.numbers[3], self.numbers[4], self.longest)
        )  # fmt: skip

    def store_logits(self, logits: Tensor) -> None:
        """Store (R, V) of any dtype."""
        if self.is_standing:
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
        """Take the largest step: rows, sequences, and positions of a sequence (`longest`)."""
        self._model, self._cache = model, cache
        self.rows, self.positions = row_numbers(rows), position_numbers(longest)
        blocks = 1 + sequences * -(-longest // cache.size)
        self._memory = StepMemory(self.rows[-1], blocks, model.shape.vocab, cache.device)
        self.graphs: FormGraphs[RowStep] = FormGraphs(capture=capture, most=len(self.rows) * len(self.positions))
        self._weights = [*model.parameters(), *model.buffers()]
        self.launched = 0
        """Steps that a graph has computed."""
        self._reports = 0

    @property
    def bytes(self) -> int:
        """Bytes of the pool of all graphs, and of the memory outside it."""
        return self._memory.bytes + self.graphs.capture.bytes

    def round_up(self, rows: int) -> int:
        """Return the number of rows of the graph for a step of `rows` rows. 0 = no graph is large enough."""
        return next((size for size in self.rows if size >= rows), 0)

    def capture_all(self, head: Callable[[Tensor], Tensor], say: Callable[[str], None]) -> None:
        """Capture a graph for every number of rows and positions, the largest first, so that all share its memory.

        Each step first runs without a graph: its kernels are compiled and loaded then, which no capture may do.
        """
        forms = [(rows, positions) for rows in reversed(self.rows) for positions in reversed(self.positions)]
        begun = monotonic()
        for done, (rows, positions) in enumerate(forms):
            if not done or monotonic() - begun > SECONDS_BETWEEN * (1 + self._reports):
                self._reports += bool(done)
                say(f"CUDA graphs: {done} of {len(forms)} are captured")
            numbers = torch.zeros(NUMBERS, rows, dtype=torch.int64, device=self._cache.device)
            # Rows of a capture write somewhere too: where nobody reads.
            numbers[2] = self._cache.unread * self._cache.size
            step = RowStep(numbers, self._memory.tables[:1], positions, self._memory)
            if not done:  # the first step joins matrices: where weights lie is final behind it
                with self.graphs.capture.beside():
                    self._work(head)(step)
                self.graphs.read(self._weights)
            self.graphs.prepare(step, self._work(head))
        say(f"CUDA graphs: {len(forms)} are captured, in {monotonic() - begun:.0f} s and {gib(self.bytes)}")

    def compute(self, step: PackedStep, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits (R, V) fp32 behind all rows of a `padded` step. The next step overwrites them.

        `head` maps hidden states (R, D) to logits.
        """
        assert step.numbers is not None and step.places.rows is not None
        longest = next(positions for positions in self.positions if positions >= step.places.rows.longest)
        row_step = RowStep(step.numbers, step.places.rows.tables, longest, self._memory)
        # Weights that have moved since the capture would be read at their old addresses.
        self.graphs.read(self._weights)
        self.launched += self.graphs.call(row_step, self._work(head))
        assert row_step.logits is not None
        return row_step.logits

    def _work(self, head: Callable[[Tensor], Tensor]) -> Callable[[RowStep], None]:
        def work(step: RowStep) -> None:
            cache = self._cache.at(step.places)
            x, _ = self._model.hidden(step.numbers[:1], positions=step.numbers[1:2], cache=cache)
            step.store_logits(head(x[0]))

        return work


def reason_without(model: Transformer, cache: PagedCache, ranks: int) -> str:
    """Return why steps of a model, computed by that many ranks, cannot be CUDA graphs. Empty = they can."""
    weight = model.embed.weight
    if weight.device.type != "cuda":
        return f"graphs are for a GPU, and this is a {weight.device.type}"
    if ranks > 1:
        return f"{ranks} ranks exchange parts in each layer, which is not captured"
    if not cache.by_rows:
        return f"attention of rows that decode is by {cache.attention}"
    coded = [weight_module for weight_module in model.modules() if isinstance(weight_module, QuantizedWeight)]
    if any(weight_module.scheme.outliers == "threshold" for weight_module in coded):
        return "which columns of a step are outliers is read from the device"
    if any(weight_module.scheme.activation_share == "tensor" for weight_module in coded):
        return "all rows of a step share a scale, and those that fill up a graph would count for it"
    if any(len(weight_module.size) > 2 for weight_module in coded):
        return "products of quantized experts wait for the lengths of their runs"
    if model.shape.moe and not counts_stay(model.shape, model.kernels, weight.device, weight.dtype):
        return "products of experts wait for the lengths of their runs"
    return ""


def step_graphs(
    model: Transformer, cache: PagedCache, mode: Graphs, *, ranks: int, rows: int, sequences: int, longest: int
) -> tuple[StepGraphs | None, str]:
    """Return the graphs of an engine, and a sentence about them.

    Raises ArgumentError if they are required and impossible.
    """
    if mode == "off":
        return None, "off (cuda_graphs=off)"
    reason = reason_without(model, cache, ranks)
    if reason:
        if mode == "on":
            raise ArgumentError(
                "cuda_graphs", "on", "cannot be", f"{reason}; take {argument('cuda_graphs', 'auto')} or off"
            )
        return None, f"off ({reason})"
    graphs = StepGraphs(model, cache, CudaCapture(cache.device), rows=rows, sequences=sequences, longest=longest)
    return graphs, f"on, captured at the start (rows: {', '.join(map(str, graphs.rows))})"
