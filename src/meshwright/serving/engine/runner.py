"""Computation of steps: the trainer's own model over packed rows, with the paged cache.

Ranks that serve a model together build their runners from the same setup, and compute the same steps over their own
part of keys and values. A step is sent as integers. First come moves, in order. Then for each sequence in a step: its
number here and its adapter's, what was computed, how many tokens follow and which, and new entries of its block table.
The reader has its own sequence for each. Whatever depends on the identity of a sequence, such as the rows of dense
copies, is then decided alike everywhere.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from typing import Self, final

import torch
from torch import Tensor

from meshwright.kernels.c import serving_library
from meshwright.model.transformer import Transformer
from meshwright.serving.engine.cache.blocks import MOVES, CachedSequence, Move, Phase
from meshwright.serving.engine.cache.paged_cache import PagedCache
from meshwright.serving.engine.engine_options import GRAPHS, EngineOptions
from meshwright.serving.engine.rows.exact_rows import ExactRows
from meshwright.serving.engine.rows.packed_step import PackedStep, RowPacker, Run
from meshwright.serving.engine.rows.prepared_layers import PreparedLayers
from meshwright.serving.engine.rows.request_adapters import RequestAdapters
from meshwright.serving.engine.rows.serving_ranks import RankCommand, ServingRanks
from meshwright.serving.engine.scheduler import StepPlan
from meshwright.serving.engine.step_graphs import StepGraphs, step_graphs
from meshwright.spec.plan.execution import CACHE_FORMS, HEADS


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
            copies_bytes: Most bytes of all dense copies (packed_step.py).
            adapters: Adapters of requests. None = those of sequences are ignored.
            ranks: Ranks with the other parts of the model.
            graphs: CUDA graphs for steps that allow them. Not used in exact mode.
            graphs_words: Which graphs there are, or why there are none.
        """
        self.model, self.cache, self._layers, self._adapters, self._ranks = model, cache, layers, adapters, ranks
        self.graphs, self.graphs_words = graphs, graphs_words
        self._head = head = layers.logits if ranks is None else _then(layers.logits, ranks.gather_on_rank_zero)
        on_all = head if ranks is None else _then(layers.logits, ranks.gather_logits)
        self._multiple = 1 if ranks is None else ranks.row_multiple
        self._writer = StepWriter()
        self._packer = RowPacker(cache, longest, exact=exact, copies_bytes=copies_bytes)
        low_rank = cache.layers[0].low_rank
        with layers.use():
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
        with self._layers.use():
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
        # The others must have the step before this rank enters its first collective.
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
        with self._layers.use(), self._exact.exact_experts() if self._exact else nullcontext():
            for rows in self._passes(runs):
                if drawn is not None:
                    rows.take_drawn(drawn)
                cache = self.cache.at(rows.places)
                with self._adapters.apply_to(rows.adapters) if self._adapters else nullcontext():
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
        size = graphs.round_up(sum(run.end - run.begin for run in runs))
        adapted = self._adapters is not None and any(run.sequence.adapter for run in runs)
        # Adapters change the work of a step, which a captured graph cannot follow.
        if not size or adapted or not self._packer.attends_by_rows(runs):
            return None
        rows = self._packer.pack(runs, size)
        if drawn is not None:
            rows.take_drawn(drawn)
        with self._layers.use():
            logits = graphs.compute(rows, self._head)
        return rows.owners, logits.index_select(0, rows.wanted)  # the next step overwrites them

    def _passes(self, runs: list[Run]) -> Iterator[PackedStep]:
        """Yield the forward passes: one, or in exact mode as many as its limit of rows needs."""
        if self._exact is None:
            rows = sum(run.end - run.begin for run in runs)
            # Expert-parallel ranks split the rows evenly, so there must be a multiple of them.
            yield self._packer.pack(runs, -(-rows // self._multiple) * self._multiple)
            return
        for runs_of_pass in split_runs(runs, self._exact.most):
            yield self._packer.pack(
                runs_of_pass, self._exact.round_up(sum(run.end - run.begin for run in runs_of_pass))
            )

    def _logits(self, states: Tensor) -> Tensor:
        if self._exact is None:
            return self._head(states)
        parts = []
        for rows in states.split(self._exact.most):
            padded = rows.new_zeros(self._exact.round_up(len(rows)), rows.shape[1])
            padded[: len(rows)] = rows
            parts.append(self._head(padded)[: len(rows)])
        return torch.cat(parts)


def _then(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: second(first(x))


def split_runs(runs: list[Run], most: int) -> Iterator[list[Run]]:
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
        # Loops for few rows sum in another order than those for many.
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
        # Rank 0 sends SETUP before anything else, and again for each new engine.
        assert runner is not None, "the first rank says first how steps are computed"
        if kind is RankCommand.CLEAR:
            runner.cache.clear(words)
        elif kind is RankCommand.ADAPTER:
            ranks.take_adapter(words, adapters)
        elif kind is RankCommand.DROP:
            adapters.drop(*words)
        else:
            runner.compute(steps.step(words))


@final
class StepWriter:
    """Encoder of steps. A preempted or ended sequence is forgotten with the next step."""

    def __init__(self) -> None:
        self._sequences: dict[CachedSequence, tuple[int, list[int]]] = {}
        self._number = 0

    def words(self, step: StepPlan) -> list[int]:
        """Return all that `StepReader` needs."""
        ended = [sequence for sequence in self._sequences if sequence.phase is not Phase.RUNNING]
        words = [len(ended), *(self._sequences.pop(sequence)[0] for sequence in ended)]
        moves = [(MOVES.index(move.kind), move.source, move.target) for move in step.moves]
        words += [len(moves), *(number for move in moves for number in move), len(step.chunks)]
        for sequence, count in step.chunks.items():
            words += self._sequence_words(sequence, count)
        return words

    def _sequence_words(self, sequence: CachedSequence, count: int) -> list[int]:
        number, known_table = self._sequences.get(sequence, (self._number, []))
        self._number += number == self._number
        table = sequence.table
        # Tables mostly grow at their end: what the other ranks know already is not sent.
        shared = len(known_table) if table[: len(known_table)] == known_table else 0
        self._sequences[sequence] = number, list(table)
        begin = sequence.computed
        return [
            number, sequence.adapter, begin, count, len(sequence.tokens), sequence.guessed, sequence.preemptions,
            shared, len(table) - shared, *table[shared:], *sequence.tokens[begin : begin + count],
        ]  # fmt: skip


class _StepNumbers:
    """Integers that are read in order."""

    def __init__(self, words: Sequence[int]) -> None:
        self._words, self._position = words, 0

    def take(self, count: int) -> list[int]:
        """Return the next `count` integers."""
        begin = self._position
        self._position += count
        return list(self._words[begin : self._position])

    def take_one(self) -> int:
        """Return the next integer."""
        return self.take(1)[0]

    def take_counted(self) -> list[int]:
        """Return as many integers as the next one says."""
        return self.take(self.take_one())


@final
class StepReader:
    """Decoder of steps, in the order in which they were written. Tokens that are not computed are zero."""

    def __init__(self) -> None:
        self._sequences: dict[int, CachedSequence] = {}

    def step(self, words: Sequence[int]) -> StepPlan:
        """Return the step that `StepWriter` encoded."""
        rest = _StepNumbers(words)
        for number in rest.take_counted():
            del self._sequences[number]
        moves = (rest.take(3) for _ in range(rest.take_one()))
        step = StepPlan(moves=[Move(MOVES[kind], source, target) for kind, source, target in moves])
        for _ in range(rest.take_one()):
            sequence, count = self._read_sequence(rest)
            step.chunks[sequence] = count
        return step

    def _read_sequence(self, rest: _StepNumbers) -> tuple[CachedSequence, int]:
        number, adapter, begin, count, length, guessed, preemptions, shared = rest.take(8)
        sequence = self._sequences.get(number)
        if sequence is None:
            sequence = self._sequences[number] = CachedSequence(
                number, [], 0, b"", adapter=adapter, phase=Phase.RUNNING
            )  # fmt: skip
        sequence.table[shared:] = rest.take_counted()
        tokens = sequence.tokens
        del tokens[length:]
        # Only computed tokens are ever read here. Zeros keep the positions of the others.
        tokens += [0] * (length - len(tokens))
        tokens[begin : begin + count] = rest.take(count)
        sequence.computed, sequence.guessed, sequence.preemptions = begin, guessed, preemptions
        return sequence, count
