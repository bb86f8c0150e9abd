"""The rows of a step: tokens of many sequences in one row, where they are kept, and which are attended together.

Two ways of grouping rows into calls of attention (kernels/paged_attention.py):

    fast    new tokens of all sequences that decode, in a call for each of a few lengths; a chunk of a prompt is a call
    exact   each row is a sequence of one query over a number of keys that follows from its position alone

Compiled loops, and on a GPU a kernel, attend row by row without calls; in the fast way a chunk of a prompt is a call
all the same.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from meshwright.kernels.paged_attention import HIDDEN, DenseCall, PagedCall, RowsCall, SeenBand
from meshwright.serve.cached_sequence import CachedSequence
from meshwright.serve.dense_copies import CopyPlan, DenseCopies
from meshwright.serve.host_copies import to_device
from meshwright.serve.low_rank_product import Rows
from meshwright.serve.paged_cache import CopyStep, PagedCache, StepPlaces
from meshwright.serve.request_adapters import rows_of


def _lengths(longest: int, size: int, part: int) -> list[int]:
    """Numbers of keys that calls have, in blocks of `size`: each is longer than the last by a `part` of it."""
    found = [1]
    while found[-1] * size < longest:
        found.append(found[-1] + max(1, found[-1] // part))
    return [blocks * size for blocks in found]


CHUNK = 16
"""Tokens of a run from which on one call is taken for faster than a GPU's kernel that reads keys once for each."""
LOOPED_CHUNK = 56
"""The same of compiled loops, measured."""
PART = 2
"""Of a length that the next one is longer by: calls are fewer, or hide fewer keys for nothing."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of a sequence."""

    sequence: CachedSequence
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A forward pass of packed rows."""

    tokens: Tensor
    """(1, N)."""
    positions: Tensor
    """(1, N)."""
    places: StepPlaces
    last: list[int]
    """Rows behind which a token is made: of the last token of a sequence, and of each of its guesses."""
    owners: list[CachedSequence]
    """Whose they are."""
    adapters: Mapping[int, Rows]
    """Rows that have an adapter, by its number."""
    wanted: Tensor
    """`last` on the device."""
    drawn: tuple[Tensor, Tensor] | None = None
    """Rows (P,) whose token is not known to the host, and the rows (P,) of the step before that drew it."""
    numbers: Tensor | None = None
    """(5, N) int64 where all rows are attended one by one: tokens, positions, slots, and as RowsCall offsets and
    last."""

    def take_drawn(self, tokens: Tensor) -> None:
        """Put tokens in their places that the step before drew, (R,) int64 on the device."""
        if self.drawn is not None:
            rows, sources = self.drawn
            self.tokens[0].index_copy_(0, rows, tokens.index_select(0, sources))


class RowPacker:
    """Makes the rows of steps over one cache."""

    def __init__(self, cache: PagedCache, longest: int, *, exact: bool, copies_bytes: int) -> None:
        """`longest`: positions of a sequence; `copies_bytes`: most bytes of dense copies."""
        self._cache, self._exact = cache, exact
        self._lengths = _lengths(longest, cache.size, PART)
        self._copies = DenseCopies(cache.copied_bytes, copies_bytes if cache.form == "model" else 0)

    def pack(self, runs: Sequence[Run], rows: int) -> PackedStep:
        """`rows` at least as many as the runs have tokens; those beyond are written where nobody reads."""
        plans, runs = ([], self._chunks_last(runs)) if self._cache.by_rows else self._sorted(runs)
        size, table = self._cache.size, [run.sequence.table for run in runs]
        tokens, positions, slots, last = list[int](), list[int](), list[int](), list[int]()
        owners, spans = list[CachedSequence](), dict[int, list[tuple[int, int]]]()
        for run, blocks in zip(runs, table, strict=True):
            if run.sequence.adapter:
                span = len(tokens), len(tokens) + run.end - run.begin
                spans.setdefault(run.sequence.adapter, []).append(span)
            tokens += run.sequence.tokens[run.begin : run.end]
            positions += range(run.begin, run.end)
            slots += [blocks[place // size] * size + place % size for place in range(run.begin, run.end)]
            count = max(0, run.end - max(run.begin, len(run.sequence.tokens) - 1 - run.sequence.guessed))
            last += range(len(tokens) - count, len(tokens))
            owners += [run.sequence] * count
        more = rows - len(tokens)
        drawn = [(row, -1 - token) for row, token in enumerate(tokens) if token < 0]
        fed = [tokens + [0] * more, positions + [0] * more, slots + [self._cache.unread * size] * more]
        beside = last, [row for row, _ in drawn], [source for _, source in drawn]
        adapters = rows_of(spans, self._cache.device)
        if self._cache.by_rows:
            numbers, places, (wanted, *sources) = self._places(fed, runs, more, beside)
            alone = None if places.rows is None or len(places.rows.last) < rows else numbers
        else:
            numbers, (wanted, *sources) = _copied(fed, beside, self._cache.device)
            copied = sum(len(plan.used) for plan in plans)
            calls = {window: self._calls(runs[0 if window else copied :], window) for window in self._cache.windows}
            places, alone = StepPlaces(numbers[2], [self._copy(plan) for plan in plans], calls), None
        unread = (sources[0], sources[1]) if drawn else None
        return PackedStep(numbers[:1], numbers[1:2], places, last, owners, adapters, wanted, unread, alone)

    def _chunks_last(self, runs: Sequence[Run]) -> list[Run]:
        return sorted(runs, key=lambda run: (self._is_chunk(run), run.sequence.adapter))

    def attends_by_rows(self, runs: Sequence[Run]) -> bool:
        """Whether all rows are attended one by one."""
        return self._cache.by_rows and not any(self._is_chunk(run) for run in runs)

    def _is_chunk(self, run: Run) -> bool:
        """Whether a run is one call in spite of compiled loops."""
        return not self._exact and run.end - run.begin >= (LOOPED_CHUNK if self._cache.loops else CHUNK)

    def _places(
        self, fed: list[list[int]], runs: Sequence[Run], more: int, beside: Sequence[list[int]]
    ) -> tuple[Tensor, StepPlaces, list[Tensor]]:
        """Numbers as those of PackedStep, of which `fed` are the first three; where loops or a kernel find the rows of
        sorted runs, behind which `more` rows belong to nobody; and what else goes to the device `beside` them."""
        tables, offsets, last = [self._cache.zero], list[int](), list[int]()
        for run in runs:
            if not self._is_chunk(run):
                offsets += [len(tables)] * (run.end - run.begin)
                last += range(run.begin, run.end)
                tables += run.sequence.table
        chunks, alone = [run for run in runs if self._is_chunk(run)], len(last)
        calls = {window: [self._chunk(*one, window) for one in _begun(chunks, 0)] for window in self._cache.windows}
        rows = alone if chunks else alone + more
        fill = [0] * (len(fed[0]) - alone)
        parts = tables, *beside
        numbers, (blocks, *more_parts) = _copied([*fed, offsets + fill, last + fill], parts, self._cache.device)
        offsets_of, last_of, longest = numbers[3, :rows], numbers[4, :rows], max(last, default=0) + 1
        call = RowsCall(blocks, offsets_of, last_of, longest)
        return numbers, StepPlaces(numbers[2], [], calls, call if rows or not chunks else None), more_parts

    def _sorted(self, runs: Sequence[Run]) -> tuple[list[CopyPlan], list[Run]]:
        """Runs that share a call one after another, first those with a row of a dense copy; and these copies."""
        growing = [(run.sequence, run.begin, self._keys(run.end)) for run in runs if run.end - run.begin == 1]
        plans = self._copies.plan(growing) if growing else []
        place = {one.sequence: (plan.keys, one.row) for plan in plans for one in plan.used}
        last = self._lengths[-1] + 1
        order = [
            (*place.get(run.sequence, (last, 0)), run.end - run.begin > 1, self._keys(run.end), number)
            for number, run in enumerate(runs)
        ]
        return plans, [runs[number] for *_, number in sorted(order)]

    def _copy(self, plan: CopyPlan) -> CopyStep:
        device, size = self._cache.device, self._cache.size
        places = [0] * plan.rows
        for one in plan.used:
            places[one.row] = one.position
        rows = to_device([one.row for one in plan.used], device, torch.int64)
        added = rows, to_device([one.position for one in plan.used], device, torch.int64)
        new = [one for one in plan.used if one.new]
        zero, number = self._cache.zero, plan.keys // size
        tables = [(one.sequence.table + [zero] * number)[:number] for one in new]
        gathered = to_device([one.row for one in new], device), to_device(tables, device)
        call = DenseCall(None if len(plan.used) == plan.rows else rows, self._bias(places, plan.keys, 0)[:, None])
        return CopyStep(plan.keys, plan.room, plan.rows, len(rows), gathered if new else None, added, call)

    def _keys(self, seen: int) -> int:
        """The number of keys of a call for so many that are seen."""
        return self._lengths[bisect_left(self._lengths, seen)]

    def _first(self, position: int, window: int) -> int:
        """The first block that a query sees."""
        return max(0, position - window + 1) // self._cache.size if window else 0

    def _calls(self, runs: Sequence[Run], window: int) -> list[PagedCall]:
        begin, calls = 0, []
        for alone, some in groupby(runs, lambda run: self._kind(run, window)):
            together = list(some)
            if alone[0] == "queries":
                made = [self._queries(run, window, begin_of) for run, begin_of in _begun(together, begin)]
                calls += [call for one in made for call in one]
            elif alone[0] == "decode":
                calls.append(self._decode(together, window, begin, alone[1]))
            else:
                calls += [self._chunk(run, begin_of, window) for run, begin_of in _begun(together, begin)]
            begin += sum(run.end - run.begin for run in together)
        return calls

    def _kind(self, run: Run, window: int) -> tuple[str, int]:
        if run.end - run.begin == 1:
            return "decode", self._keys(run.end - self._first(run.begin, window) * self._cache.size)
        return "queries" if self._exact else "chunk", 0

    def _decode(self, runs: Sequence[Run], window: int, begin: int, keys: int) -> PagedCall:
        """A query of each, over as many keys."""
        firsts = [self._first(run.begin, window) for run in runs]
        number = keys // self._cache.size
        blocks = [run.sequence.table[first : first + number] for run, first in zip(runs, firsts, strict=True)]
        positions = [run.begin - first * self._cache.size for run, first in zip(runs, firsts, strict=True)]
        return PagedCall(begin, len(runs), 1, self._table(blocks, number), self._bias(positions, keys, window)[:, None])

    def _queries(self, run: Run, window: int, begin: int) -> list[PagedCall]:
        """As `_decode` for each token of a run; those with equal blocks and keys in one call."""
        size, calls = self._cache.size, []
        places = ((position, self._first(position, window)) for position in range(run.begin, run.end))
        for (first, keys), some in groupby(places, lambda one: (one[1], self._keys(one[0] + 1 - one[1] * size))):
            positions = [position - first * size for position, _ in some]
            blocks = self._table([run.sequence.table[first : first + keys // size]], keys // size)
            bias = self._bias(positions, keys, window)[:, None]
            calls.append(PagedCall(begin, len(positions), 1, blocks, bias))
            begin += len(positions)
        return calls

    def _chunk(self, run: Run, begin: int, window: int) -> PagedCall:
        """All queries of a run."""
        count = run.end - run.begin
        if not run.begin and not 0 < window < count:
            return PagedCall(begin, 1, count, None, None)
        first = self._first(run.begin, window)
        number = -(-run.end // self._cache.size) - first
        band = SeenBand(run.end - first * self._cache.size, window)
        return PagedCall(begin, 1, count, self._table([run.sequence.table[first : first + number]], number), None, band)

    def _table(self, blocks: list[list[int]], number: int) -> Tensor | slice:
        """(B, number), padded with the block that stays zero; a run of blocks where one sequence has so many in a run:
        what lies behind is of others, and no numbers of theirs would make none of its own."""
        own = blocks[0]
        if len(blocks) == 1 and own == list(range(own[0], own[0] + number)):
            return slice(own[0], own[0] + number)
        zero = self._cache.zero
        return to_device([own + [zero] * (number - len(own)) for own in blocks], self._cache.device)

    def _bias(self, positions: list[int], keys: int, window: int) -> Tensor:
        """(rows, 1, keys) fp32 for queries at positions among the keys."""
        query = to_device(positions, self._cache.device)[:, None]
        key = torch.arange(keys, device=self._cache.device)
        seen = key <= query
        if window:
            seen &= key > query - window
        return torch.zeros(seen.shape, dtype=torch.float32, device=seen.device).masked_fill_(~seen, HIDDEN)[:, None]


ALIGNED = 16
"""Numbers of which each part of a copy begins at a multiple: a Triton kernel is compiled anew for other addresses."""


def _copied(
    rows: Sequence[list[int]], parts: Sequence[list[int]], device: torch.device
) -> tuple[Tensor, Sequence[Tensor]]:
    """Lists of one length as (lists, N) int64 on the device, and other lists beside them: all in one copy."""
    together, begins = array("q"), list[int]()
    for part in (*rows, *parts):
        begins.append(len(together))
        together.fromlist(part)
        together.frombytes(bytes(together.itemsize * (-len(part) % ALIGNED)))
    on_device, width = to_device(together, device, torch.int64), len(rows[0])
    numbers = on_device[: begins[len(rows)]].view(len(rows), -1)[:, :width]
    ends = (begin + len(part) for begin, part in zip(begins[len(rows) :], parts, strict=True))
    return numbers, [on_device[begin:end] for begin, end in zip(begins[len(rows) :], ends, strict=True)]


def _begun(runs: Sequence[Run], begin: int) -> Iterable[tuple[Run, int]]:
    for run in runs:
        yield run, begin
        begin += run.end - run.begin
