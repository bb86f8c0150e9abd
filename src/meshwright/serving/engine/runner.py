"""Computation of steps: the trainer's own model over packed rows, with the paged cache."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import final

import torch
from torch import Tensor

from meshwright.model.transformer import Transformer
from meshwright.serving.engine.cache.cached_sequence import CachedSequence
from meshwright.serving.engine.cache.paged_cache import PagedCache
from meshwright.serving.engine.rows.exact_rows import ExactRows
from meshwright.serving.engine.rows.packed_step import PackedStep, RowPacker, Run
from meshwright.serving.engine.rows.prepared_layers import PreparedLayers
from meshwright.serving.engine.rows.request_adapters import RequestAdapters
from meshwright.serving.engine.rows.serving_ranks import RankCommand, ServingRanks
from meshwright.serving.engine.scheduler import StepPlan
from meshwright.serving.engine.step_graphs import StepGraphs
from meshwright.serving.engine.step_words import StepWriter


@final
class Runner:
    """One model on one device. Use under `torch.no_grad`, with the model in evaluation mode."""

    def __init__(
        self,
        model: Transformer,
        cache: PagedCache,
        layers: PreparedLayers,
        *,
        longest: int,
        most_tokens: int,
        exact: bool,
        copies_bytes: int,
        adapters: RequestAdapters | None = None,
        ranks: ServingRanks | None = None,
        graphs: StepGraphs | None = None,
        graphs_words: str = "",
    ) -> None:
        """Prepare the model for steps.

        Args:
            longest: Positions of a sequence.
            most_tokens: Tokens of a step.
            exact: A row's bits depend on its own sequence alone.
            copies_bytes: Most bytes of all dense copies (dense_copies.py).
            adapters: Adapters of requests. None = those of sequences are ignored.
            ranks: Ranks with the other parts of the model.
            graphs: CUDA graphs for steps that allow them. Not used in exact mode.
            graphs_words: Which graphs there are, or why there are none.
        """
        self.model, self.cache, self._layers, self._adapters, self._ranks = model, cache, layers, adapters, ranks
        self.graphs, self.graphs_words = graphs, graphs_words
        self._head = head = layers.logits if ranks is None else _then(layers.logits, ranks.rank_zero_logits)
        on_all = head if ranks is None else _then(layers.logits, ranks.whole_logits)
        self._multiple = 1 if ranks is None else ranks.row_multiple
        self._writer = StepWriter()
        self._packer = RowPacker(cache, longest, exact=exact, copies_bytes=copies_bytes)
        low_rank = cache.layers[0].low_rank
        with layers.used():
            self._exact = ExactRows(model, most_tokens, on_all, low_rank=low_rank) if exact else None
        self.most_rows = min(most_tokens, self._exact.most) if self._exact else most_tokens
        """Rows of the largest forward pass."""

    @property
    def copies_bytes(self) -> int:
        """Memory of the matrix copies that steps have made so far."""
        return self._layers.bytes

    def capture(self, say: Callable[[str], None]) -> None:
        """Capture the graphs of all steps that allow them, the largest first, and report progress."""
        if self.graphs is None or self._exact:
            return
        with self._layers.used():
            self.graphs.capture_all(self._head, say)

    def run(
        self, step: StepPlan, *, behind: int = 0, drawn: Tensor | None = None
    ) -> tuple[list[CachedSequence], Tensor]:
        """Compute a step, and return the sequences with a next token and their logits (R, V) fp32.

        A sequence with guesses also has a row for each of them, in order. Raises RunError when another rank is gone.

        Args:
            behind: Number of tokens to skip behind the computed ones.
            drawn: (R,) tokens of the step before on the device. A sequence's token -1 - r stands for that of row r.
        """
        if self._ranks is None:
            return self.compute(step, behind, drawn)
        assert not behind and drawn is None, "a model whose steps have parts is on one rank"
        self._ranks.send(RankCommand.STEP, self._writer.words(step))
        return self.compute(step)

    def clear(self, blocks: Sequence[int]) -> None:
        """Set blocks to zero whose content is not finite."""
        if not blocks:
            return
        if self._ranks is not None:
            self._ranks.send(RankCommand.CLEAR, blocks)
        self.cache.clear(blocks)

    def compute(
        self, step: StepPlan, behind: int = 0, drawn: Tensor | None = None
    ) -> tuple[list[CachedSequence], Tensor]:
        """Compute this rank's part of `run`. Rank 0 gets whole logits."""
        with nullcontext() if self._ranks is None else self._ranks.together():
            return self._compute(step, behind, drawn)

    def _compute(self, step: StepPlan, behind: int, drawn: Tensor | None) -> tuple[list[CachedSequence], Tensor]:
        self.cache.carry_out(step.moves)
        begins = ((sequence, sequence.computed + behind, count) for sequence, count in step.chunks.items())
        runs = [Run(sequence, begin, begin + count) for sequence, begin, count in begins]
        owners, states = list[CachedSequence](), list[Tensor]()
        if self.graphs is not None and not self._exact:
            by_graph = self._compute_by_graph(self.graphs, runs, drawn)
            if by_graph is not None:
                return by_graph
        with self._layers.used(), self._exact.exact_experts() if self._exact else nullcontext():
            for rows in self._passes(runs):
                if drawn is not None:
                    rows.take_drawn(drawn)
                cache = self.cache.at(rows.places)
                with self._adapters.over(rows.adapters) if self._adapters else nullcontext():
                    x, _ = self.model.hidden(rows.tokens, positions=rows.positions, cache=cache)
                if rows.owners:
                    owners += rows.owners
                    states.append(x[0].index_select(0, rows.wanted))
            if not owners:
                return [], torch.empty(0, self.model.shape.vocab)
            return owners, self._logits(states[0] if len(states) == 1 else torch.cat(states)).float()

    def _compute_by_graph(
        self, graphs: StepGraphs, runs: list[Run], drawn: Tensor | None
    ) -> tuple[list[CachedSequence], Tensor] | None:
        """Compute the step as a graph. None = it allows none."""
        size = graphs.padded(sum(run.end - run.begin for run in runs))
        adapted = self._adapters is not None and any(run.sequence.adapter for run in runs)
        if not size or adapted or not self._packer.attends_by_rows(runs):
            return None
        rows = self._packer.pack(runs, size)
        if drawn is not None:
            rows.take_drawn(drawn)
        with self._layers.used():
            logits = graphs.compute(rows, self._head)
        return rows.owners, logits.index_select(0, rows.wanted)  # the next step overwrites them

    def _passes(self, runs: list[Run]) -> Iterator[PackedStep]:
        """Yield the forward passes: one, or in exact mode as many as its limit of rows needs."""
        if self._exact is None:
            rows = sum(run.end - run.begin for run in runs)
            yield self._packer.pack(runs, -(-rows // self._multiple) * self._multiple)
            return
        for runs_of_pass in cut(runs, self._exact.most):
            yield self._packer.pack(runs_of_pass, self._exact.padded(sum(run.end - run.begin for run in runs_of_pass)))

    def _logits(self, states: Tensor) -> Tensor:
        if self._exact is None:
            return self._head(states)
        parts = []
        for rows in states.split(self._exact.most):
            padded = rows.new_zeros(self._exact.padded(len(rows)), rows.shape[1])
            padded[: len(rows)] = rows
            parts.append(self._head(padded)[: len(rows)])
        return torch.cat(parts)


def _then(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: second(first(x))


def cut(runs: list[Run], most: int) -> Iterator[list[Run]]:
    """Yield runs in lists of at most so many tokens. A run may be cut."""
    part, left = list[Run](), most
    for run in runs:
        begin = run.begin
        while begin < run.end:
            end = min(run.end, begin + left)
            part.append(Run(run.sequence, begin, end))
            left -= end - begin
            begin = end
            if not left:
                yield part
                part, left = [], most
    if part:
        yield part
