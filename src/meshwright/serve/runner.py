"""Computes steps: the trainer's own model over packed rows, with the paged cache."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import final

import torch
from torch import Tensor

from meshwright.model.transformer import Transformer
from meshwright.serve.cached_sequence import CachedSequence
from meshwright.serve.exact_rows import ExactRows
from meshwright.serve.packed_step import PackedStep, RowPacker, Run
from meshwright.serve.paged_cache import PagedCache
from meshwright.serve.prepared_layers import PreparedLayers
from meshwright.serve.request_adapters import RequestAdapters
from meshwright.serve.scheduler import StepPlan
from meshwright.serve.serving_ranks import RankCommand, ServingRanks
from meshwright.serve.step_graphs import StepGraphs
from meshwright.serve.step_words import StepWriter


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
        """`longest`: positions of a sequence; `most_tokens`: of a step; `copies_bytes`: of all dense copies
        (dense_copies.py). `exact`: a row's bits depend on its own sequence alone. Without `adapters`, those of
        sequences are passed over. `ranks`: with whom this one computes, each with a part of the model. `graphs`: for
        steps that may be one, not in exact mode; the words say why there are none, or which."""
        self.model, self.cache, self._layers, self._adapters, self._ranks = model, cache, layers, adapters, ranks
        self.graphs, self.graphs_words = graphs, graphs_words
        self._head = head = layers.logits if ranks is None else _then(layers.logits, ranks.first_rank_logits)
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
        """Of the matrices that steps have read in another order so far."""
        return self._layers.bytes

    def capture(self, say: Callable[[str], None]) -> None:
        """Capture the graphs of all steps that may be one, largest first, and tell people how many are done."""
        if self.graphs is None or self._exact:
            return
        with self._layers.used():
            self.graphs.capture_all(self._head, say)

    def run(
        self, step: StepPlan, *, behind: int = 0, drawn: Tensor | None = None
    ) -> tuple[list[CachedSequence], Tensor]:
        """Compute a step. Sequences that get a next token, and its logits (R, V) fp32 of each; those with guesses have
        a row for each of them, too, in order. `behind`: tokens behind those that are computed which are passed over.
        `drawn` (R,): tokens of the step before on the device; a sequence's token -1 - r stands for the one of row r.
        RunError: another rank is gone."""
        if self._ranks is None:
            return self.compute(step, behind, drawn)
        assert not behind and drawn is None, "a model whose steps have parts is on one rank"
        self._ranks.say(RankCommand.STEP, self._writer.words(step))
        return self.compute(step)

    def clear(self, blocks: Sequence[int]) -> None:
        """What they held was no numbers."""
        if not blocks:
            return
        if self._ranks is not None:
            self._ranks.say(RankCommand.CLEAR, blocks)
        self.cache.clear(blocks)

    def compute(
        self, step: StepPlan, behind: int = 0, drawn: Tensor | None = None
    ) -> tuple[list[CachedSequence], Tensor]:
        """As `run`, of what this rank has; logits are whole on the first one."""
        with nullcontext() if self._ranks is None else self._ranks.together():
            return self._compute(step, behind, drawn)

    def _compute(self, step: StepPlan, behind: int, drawn: Tensor | None) -> tuple[list[CachedSequence], Tensor]:
        self.cache.carry_out(step.moves)
        begins = ((one, one.computed + behind, count) for one, count in step.chunks.items())
        runs = [Run(one, begin, begin + count) for one, begin, count in begins]
        owners, states = list[CachedSequence](), list[Tensor]()
        if self.graphs is not None and not self._exact:
            found = self._by_graph(self.graphs, runs, drawn)
            if found is not None:
                return found
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

    def _by_graph(
        self, graphs: StepGraphs, runs: list[Run], drawn: Tensor | None
    ) -> tuple[list[CachedSequence], Tensor] | None:
        """As `_compute`, where a step may be a graph; None = it may not."""
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
        """Forward passes: one, or in exact mode as many as rows allow."""
        if self._exact is None:
            rows = sum(run.end - run.begin for run in runs)
            yield self._packer.pack(runs, -(-rows // self._multiple) * self._multiple)
            return
        for some in cut(runs, self._exact.most):
            yield self._packer.pack(some, self._exact.padded(sum(run.end - run.begin for run in some)))

    def _logits(self, states: Tensor) -> Tensor:
        """Of hidden states (R, D)."""
        if self._exact is None:
            return self._head(states)
        parts = []
        for some in states.split(self._exact.most):
            padded = some.new_zeros(self._exact.padded(len(some)), some.shape[1])
            padded[: len(some)] = some
            parts.append(self._head(padded)[: len(some)])
        return torch.cat(parts)


def _then(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: second(first(x))


def cut(runs: list[Run], most: int) -> Iterator[list[Run]]:
    """Runs in lists of at most so many tokens; a run may be cut."""
    some, left = list[Run](), most
    for run in runs:
        begin = run.begin
        while begin < run.end:
            end = min(run.end, begin + left)
            some.append(Run(run.sequence, begin, end))
            left -= end - begin
            begin = end
            if not left:
                yield some
                some, left = [], most
    if some:
        yield some
