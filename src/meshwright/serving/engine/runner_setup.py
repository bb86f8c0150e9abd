"""Construction of a runner, by an engine and alike by the ranks that follow it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from typing import Self

import torch

from meshwright.kernels.c import serving_library
from meshwright.model.transformer import Transformer
from meshwright.serving.engine.cache.paged_cache import PagedCache
from meshwright.serving.engine.engine_options import GRAPHS, EngineOptions
from meshwright.serving.engine.rows.prepared_layers import PreparedLayers
from meshwright.serving.engine.rows.request_adapters import RequestAdapters
from meshwright.serving.engine.rows.serving_ranks import RankCommand, ServingRanks
from meshwright.serving.engine.runner import Runner
from meshwright.serving.engine.step_graphs import step_graphs
from meshwright.serving.engine.step_words import StepReader
from meshwright.spec.plan.execution import CACHE_FORMS, HEADS


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSetup:
    """Settings on which all ranks must agree, as integers. See EngineOptions."""

    blocks: int
    """Blocks of the cache, the same on every rank."""
    slots: int
    """Slots of host memory, one block each."""
    block: int
    form: int
    """Index in CACHE_FORMS."""
    head: int
    """Index in HEADS."""
    packed: int
    compiled: int
    exact: int
    longest: int
    most_tokens: int
    copies_bytes: int
    graphs: int
    """Index in GRAPHS."""
    graph_rows: int
    """Rows of the largest step that is a graph."""
    sequences: int
    """Answers that are generated at once."""

    @classmethod
    def for_model(cls, options: EngineOptions, blocks: int, slots: int, longest: int) -> Self:
        """Return the setup for the model that the options belong to."""
        return cls(
            blocks=blocks, slots=slots, block=options.block, form=CACHE_FORMS.index(options.cache_dtype),
            head=HEADS.index(options.head), packed=options.packed, compiled=options.compiled, exact=options.exact,
            longest=longest, most_tokens=options.most_tokens, copies_bytes=options.copies_bytes,
            graphs=GRAPHS.index(options.cuda_graphs), graph_rows=options.most_rows, sequences=options.most_sequences,
        )  # fmt: skip

    @classmethod
    def read(cls, words: Sequence[int]) -> Self:
        """Return the setup that gave these `words`."""
        return cls(**dict(zip(cls.__slots__, words, strict=True)))

    @property
    def words(self) -> list[int]:
        """Its fields in order."""
        return [int(number) for number in astuple(self)]

    @torch.no_grad()
    def runner(
        self, model: Transformer, adapters: RequestAdapters | None = None, ranks: ServingRanks | None = None
    ) -> Runner:
        """Build the runner of a model, or of this rank's part of it."""
        with nullcontext() if ranks is None else ranks.together():
            return self._runner(model, adapters, ranks)

    def _runner(self, model: Transformer, adapters: RequestAdapters | None, ranks: ServingRanks | None) -> Runner:
        loops = serving_library.compiled() if self.compiled else None
        if self.exact and loops is not None:
            loops = loops.for_any_rows()
        cache = PagedCache(model, self.blocks, self.block, form=CACHE_FORMS[self.form], loops=loops, slots=self.slots)
        graphs, words = step_graphs(
            model, cache, GRAPHS[self.graphs], ranks=1 if ranks is None else ranks.size, rows=self.graph_rows,
            sequences=self.sequences, longest=self.longest,
        )  # fmt: skip
        return Runner(
            model,
            cache,
            PreparedLayers(model, packed=bool(self.packed), head=HEADS[self.head], loops=loops),
            longest=self.longest,
            most_tokens=self.most_tokens,
            exact=bool(self.exact),
            copies_bytes=self.copies_bytes,
            adapters=adapters,
            ranks=ranks,
            graphs=graphs,
            graphs_words=words,
        )


@torch.no_grad()
def follow(model: Transformer, ranks: ServingRanks) -> None:
    """Compute what rank 0 commands with this rank's part of the model, until it ends.

    Raises RunError when a rank is gone.
    """
    model.eval()
    runner, steps, adapters = None, StepReader(), RequestAdapters(model, exact=False)
    while True:
        kind, words = ranks.receive()
        if kind is RankCommand.END:
            return
        if kind is RankCommand.SETUP:
            setup, steps = RunnerSetup.read(words), StepReader()
            adapters = RequestAdapters(model, exact=bool(setup.exact), multiple=ranks.row_multiple)
            runner = setup.runner(model, adapters, ranks)
            continue
        assert runner is not None, "the first rank says first how steps are computed"
        if kind is RankCommand.CLEAR:
            runner.cache.clear(words)
        elif kind is RankCommand.ADAPTER:
            ranks.take_adapter(words, adapters)
        elif kind is RankCommand.DROP:
            adapters.drop(*words)
        else:
            runner.compute(steps.step(words))
