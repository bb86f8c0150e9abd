"""The rows of a step: tokens of many sequences in one row, where they are kept, and which are attended together.

Two ways of grouping rows into calls of attention (kernels/attention/paged.py):

    fast    new tokens of all decoding sequences, in one call per length out of a few; a chunk of a prompt is a call
    exact   each row is a sequence of one query over a number of keys that follows from its position alone

Compiled loops, and on a GPU a kernel, attend row by row without calls. In the fast way a chunk of a prompt is still a
call.

Gathering blocks costs more than attention over them. So in calls, a growing answer has a row of a dense copy of its
keys and values, to which each step adds one position. Its blocks are gathered once: when it begins, or outgrows the
copy's length. Copies have as many keys as calls of attention. Each is a table of rows, in which rows of ended answers
are reused.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from meshwright.kernels.attention.paged import HIDDEN, DenseCall, PagedCall, RowsCall, SeenBand
from meshwright.serving.engine.cache.blocks import CachedSequence
from meshwright.serving.engine.cache.paged_cache import CopyStep, PagedCache, StepPlaces, to_device
from meshwright.serving.engine.rows.request_adapters import Rows, rows_of


@dataclass(frozen=True, slots=True)
class CopiedRow:
    """An answer's row in a copy."""

    sequence: CachedSequence
    row: int
    position: int
    """The position that the step adds."""
    new: bool
    """True when its blocks are gathered first."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Work of a step on one copy."""

    keys: int
    """T, keys of each row."""
    room: int
    """Rows with memory. 0 = the copy is no longer used."""
    rows: int
    """Rows that attention reads. Some may be empty."""
    used: list[CopiedRow]
    """In order of rows."""


@dataclass(slots=True)
class _Copy:
    room: int = 0
    owners: list[tuple[CachedSequence, int, int] | None] = field(default_factory=list)
    """(sequence, next position, preemptions so far) of each row."""


class DenseCopies:
    """Rows of all copies, within a number of bytes."""

    def __init__(self, position_bytes: int, most_bytes: int) -> None:
        """Take the bytes of a position in all layers without a window (0 = there are none), and the limit."""
        self._left = most_bytes // position_bytes if position_bytes else 0
        """Positions that still have memory."""
        self._copies: dict[int, _Copy] = {}

    def plan(self, growing: Sequence[tuple[CachedSequence, int, int]]) -> list[CopyPlan]:
        """Assign rows to (sequence, position to compute, number of keys).

        Sequences without memory for a row get none.
        """
        wanted: dict[int, dict[CachedSequence, int]] = {}
        for sequence, position, keys in growing:
            wanted.setdefault(keys, {})[sequence] = position
        # Also copies that no answer uses now: this is where their memory is given up.
        return [self._plan_copy(keys, wanted.get(keys, {})) for keys in sorted({*wanted, *self._copies})]

    def _plan_copy(self, keys: int, sequences: Mapping[CachedSequence, int]) -> CopyPlan:
        copy = self._copies.setdefault(keys, _Copy())
        rows = self._surviving_rows(copy, sequences)
        free = [row for row, owner in enumerate(copy.owners) if owner is None][::-1]
        used = []
        for sequence, position in sequences.items():
            row = rows.get(sequence)
            if row is None and (row := free.pop() if free else self._add_row(copy, keys)) is None:
                continue
            copy.owners[row] = sequence, position + 1, sequence.preemptions
            used.append(CopiedRow(sequence, row, position, sequence not in rows))
        if not copy.owners:
            self._left += copy.room * keys
            del self._copies[keys]
            return CopyPlan(keys, 0, 0, [])
        return CopyPlan(keys, copy.room, len(copy.owners), sorted(used, key=lambda copied: copied.row))

    def _surviving_rows(self, copy: _Copy, sequences: Mapping[CachedSequence, int]) -> dict[CachedSequence, int]:
        """Return the rows that continue and free the others. If less than half continue, free all."""
        rows = {}
        for row, owner in enumerate(copy.owners):
            if owner is not None:
                sequence, position, preemptions = owner
                # A row continues only if no step was missed: after a preemption its keys are incomplete.
                if sequences.get(sequence) == position and sequence.preemptions == preemptions:
                    rows[sequence] = row
                else:
                    copy.owners[row] = None
        # Attention reads all rows up to the last one. Mostly empty ones cost more than gathering anew.
        if 2 * len(rows) < len(copy.owners):
            copy.owners.clear()
            return {}
        # Empty rows at the end need not be read. Those in between wait for new owners.
        while copy.owners and copy.owners[-1] is None:
            copy.owners.pop()
        return rows

    def _add_row(self, copy: _Copy, keys: int) -> int | None:
        """Return one more row. None = memory is used up."""
        if len(copy.owners) == copy.room:
            # Doubling: each growth copies all rows, so few growths must serve many answers.
            more = max(1, copy.room)
            if more * keys > self._left:
                return None
            copy.room += more
            self._left -= more * keys
        copy.owners.append(None)
        return len(copy.owners) - 1


def _lengths(longest: int, size: int, part: int) -> list[int]:
    """Return the numbers of keys of calls, in blocks of `size`. Each is longer than the last by a `part` of it."""
    lengths = [1]
    while lengths[-1] * size < longest:
        lengths.append(lengths[-1] + max(1, lengths[-1] // part))
    return [blocks * size for blocks in lengths]


CHUNK = 16
"""Tokens of a run from which on one call is assumed faster than a GPU kernel that reads keys once per token."""
LOOPED_CHUNK = 56
"""The same for compiled loops, measured."""
PART = 2
"""Growth of lengths by 1 / PART. Smaller steps mean more calls, larger ones more hidden keys."""


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
    """Rows whose next token is wanted: the last token of a sequence, and each of its guesses."""
    owners: list[CachedSequence]
    """Sequences of these rows."""
    adapters: Mapping[int, Rows]
    """Rows with an adapter, by its number."""
    wanted: Tensor
    """`last` on the device."""
    drawn: tuple[Tensor, Tensor] | None = None
    """Rows (P,) whose token only the device knows, and the rows (P,) of the step before that drew it."""
    numbers: Tensor | None = None
    """(5, N) int64 if all rows are attended one by one.

    They are tokens, positions, slots, and the offsets and last positions of RowsCall.
    """

    def take_drawn(self, tokens: Tensor) -> None:
        """Insert tokens that the step before drew, (R,) int64 on the device."""
        if self.drawn is not None:
            rows, sources = self.drawn
            self.tokens[0].index_copy_(0, rows, tokens.index_select(0, sources))


class RowPacker:
    """Packer of the rows of steps over one cache."""

    def __init__(self, cache: PagedCache, longest: int, *, exact: bool, copies_bytes: int) -> None:
        """Take positions of a sequence (`longest`), and the most bytes of dense copies."""
        self._cache, self._exact = cache, exact
        self._lengths = _lengths(longest, cache.size, PART)
        self._copies = DenseCopies(cache.copied_bytes, copies_bytes if cache.form == "model" else 0)

    def pack(self, runs: Sequence[Run], rows: int) -> PackedStep:
        """Pack runs into at least as many `rows` as they have tokens. Extra rows are written where nobody reads."""
        plans, runs = ([], self._chunks_last(runs)) if self._cache.by_rows else self._sort_by_call(runs)
        size, table = self._cache.size, [run.sequence.table for run in runs]
        tokens, positions, slots, last = list[int](), list[int](), list[int](), list[int]()
        owners, spans = list[CachedSequence](), dict[int, list[tuple[int, int]]]()
        for run, blocks in zip(runs, table, strict=True):
            if run.sequence.adapter:
                span = len(tokens), len(tokens) + run.end - run.begin
                spans.setdefault(run.sequence.adapter, []).append(span)
            tokens += run.sequence.tokens[run.begin : run.end]
            positions += range(run.begin, run.end)
            slots += [blocks[position // size] * size + position % size for position in range(run.begin, run.end)]
            # The next token is drawn behind the last token, and behind each guess before it.
            count = max(0, run.end - max(run.begin, len(run.sequence.tokens) - 1 - run.sequence.guessed))
            last += range(len(tokens) - count, len(tokens))
            owners += [run.sequence] * count
        padding = rows - len(tokens)
        # A negative token stands for one that only the device knows (see StepLoop).
        drawn = [(row, -1 - token) for row, token in enumerate(tokens) if token < 0]
        columns = [tokens + [0] * padding, positions + [0] * padding, slots + [self._cache.unread * size] * padding]
        lists = last, [row for row, _ in drawn], [source for _, source in drawn]
        adapters = rows_of(spans, self._cache.device)
        if self._cache.by_rows:
            numbers, places, (wanted, *sources) = self._row_places(columns, runs, padding, lists)
            row_numbers = None if places.rows is None or len(places.rows.last) < rows else numbers
        else:
            numbers, (wanted, *sources) = _copy_to_device(columns, lists, self._cache.device)
            copied = sum(len(plan.used) for plan in plans)
            calls = {window: self._calls(runs[0 if window else copied :], window) for window in self._cache.windows}
            places, row_numbers = StepPlaces(numbers[2], [self._copy(plan) for plan in plans], calls), None
        drawn_rows = (sources[0], sources[1]) if drawn else None
        return PackedStep(numbers[:1], numbers[1:2], places, last, owners, adapters, wanted, drawn_rows, row_numbers)

    def _chunks_last(self, runs: Sequence[Run]) -> list[Run]:
        # Neighbours with one adapter make one slice of rows, which needs no index.
        return sorted(runs, key=lambda run: (self._is_chunk(run), run.sequence.adapter))

    def attends_by_rows(self, runs: Sequence[Run]) -> bool:
        """Return whether all rows are attended one by one."""
        return self._cache.by_rows and not any(self._is_chunk(run) for run in runs)

    def _is_chunk(self, run: Run) -> bool:
        """Return whether a run is one call in spite of compiled loops."""
        return not self._exact and run.end - run.begin >= (LOOPED_CHUNK if self._cache.loops else CHUNK)

    def _row_places(
        self, columns: list[list[int]], runs: Sequence[Run], padding: int, lists: Sequence[list[int]]
    ) -> tuple[Tensor, StepPlaces, list[Tensor]]:
        """Return the numbers of PackedStep, the places of rows for loops or a kernel, and the other lists.

        `columns` are the first three numbers; `padding` rows behind the sorted runs belong to nobody.
        """
        # Offset 0 leads to the zero block: padding rows read it, and nothing of a sequence.
        tables, offsets, last = [self._cache.zero], list[int](), list[int]()
        for run in runs:
            if not self._is_chunk(run):
                offsets += [len(tables)] * (run.end - run.begin)
                last += range(run.begin, run.end)
                tables += run.sequence.table
        chunks, row_count = [run for run in runs if self._is_chunk(run)], len(last)
        calls = {
            window: [self._chunk_call(*run_start, window) for run_start in _with_starts(chunks, 0)]
            for window in self._cache.windows
        }
        rows = row_count if chunks else row_count + padding
        fill = [0] * (len(columns[0]) - row_count)
        parts = tables, *lists
        numbers, (blocks, *more_parts) = _copy_to_device(
            [*columns, offsets + fill, last + fill], parts, self._cache.device
        )
        offsets_of, last_of, longest = numbers[3, :rows], numbers[4, :rows], max(last, default=0) + 1
        call = RowsCall(blocks, offsets_of, last_of, longest)
        return numbers, StepPlaces(numbers[2], [], calls, call if rows or not chunks else None), more_parts

    def _sort_by_call(self, runs: Sequence[Run]) -> tuple[list[CopyPlan], list[Run]]:
        """Return dense copies, and runs ordered so that those of one call are neighbours, rows of copies first."""
        growing = [(run.sequence, run.begin, self._keys(run.end)) for run in runs if run.end - run.begin == 1]
        plans = self._copies.plan(growing) if growing else []
        copy_of = {copied.sequence: (plan.keys, copied.row) for plan in plans for copied in plan.used}
        # Runs without a copy come behind all that have one.
        last = self._lengths[-1] + 1
        order = [
            (*copy_of.get(run.sequence, (last, 0)), run.end - run.begin > 1, self._keys(run.end), number)
            for number, run in enumerate(runs)
        ]
        return plans, [runs[number] for *_, number in sorted(order)]

    def _copy(self, plan: CopyPlan) -> CopyStep:
        device, size = self._cache.device, self._cache.size
        row_positions = [0] * plan.rows
        for copied in plan.used:
            row_positions[copied.row] = copied.position
        rows = to_device([copied.row for copied in plan.used], device, torch.int64)
        added = rows, to_device([copied.position for copied in plan.used], device, torch.int64)
        new = [copied for copied in plan.used if copied.new]
        zero, number = self._cache.zero, plan.keys // size
        tables = [(copied.sequence.table + [zero] * number)[:number] for copied in new]
        gathered = to_device([copied.row for copied in new], device), to_device(tables, device)
        call = DenseCall(
            None if len(plan.used) == plan.rows else rows, self._bias(row_positions, plan.keys, 0)[:, None]
        )
        return CopyStep(plan.keys, plan.room, plan.rows, len(rows), gathered if new else None, added, call)

    def _keys(self, seen: int) -> int:
        return self._lengths[bisect_left(self._lengths, seen)]

    def _first_block(self, position: int, window: int) -> int:
        """Return the first block that a query sees."""
        return max(0, position - window + 1) // self._cache.size if window else 0

    def _calls(self, runs: Sequence[Run], window: int) -> list[PagedCall]:
        begin, calls = 0, []
        for kind, members in groupby(runs, lambda run: self._kind(run, window)):
            runs_of_kind = list(members)
            if kind[0] == "queries":
                query_calls = [
                    self._query_calls(run, window, start) for run, start in _with_starts(runs_of_kind, begin)
                ]
                calls += [call for run_calls in query_calls for call in run_calls]
            elif kind[0] == "decode":
                calls.append(self._decode_call(runs_of_kind, window, begin, kind[1]))
            else:
                calls += [self._chunk_call(run, start, window) for run, start in _with_starts(runs_of_kind, begin)]
            begin += sum(run.end - run.begin for run in runs_of_kind)
        return calls

    def _kind(self, run: Run, window: int) -> tuple[str, int]:
        if run.end - run.begin == 1:
            return "decode", self._keys(run.end - self._first_block(run.begin, window) * self._cache.size)
        return "queries" if self._exact else "chunk", 0

    def _decode_call(self, runs: Sequence[Run], window: int, begin: int, keys: int) -> PagedCall:
        """Return a call with one query per run, over equally many keys."""
        firsts = [self._first_block(run.begin, window) for run in runs]
        number = keys // self._cache.size
        blocks = [run.sequence.table[first : first + number] for run, first in zip(runs, firsts, strict=True)]
        positions = [run.begin - first * self._cache.size for run, first in zip(runs, firsts, strict=True)]
        return PagedCall(begin, len(runs), 1, self._table(blocks, number), self._bias(positions, keys, window)[:, None])

    def _query_calls(self, run: Run, window: int, begin: int) -> list[PagedCall]:
        """Return calls like `_decode_call` for each token of a run. Tokens with equal blocks and keys share one."""
        size, calls = self._cache.size, []
        # Equal numbers of keys from an equal first block: the order of sums is that of `_decode_call`.
        positions_seen = ((position, self._first_block(position, window)) for position in range(run.begin, run.end))
        for (first, keys), group in groupby(
            positions_seen, lambda seen: (seen[1], self._keys(seen[0] + 1 - seen[1] * size))
        ):
            positions = [position - first * size for position, _ in group]
            blocks = self._table([run.sequence.table[first : first + keys // size]], keys // size)
            bias = self._bias(positions, keys, window)[:, None]
            calls.append(PagedCall(begin, len(positions), 1, blocks, bias))
            begin += len(positions)
        return calls

    def _chunk_call(self, run: Run, begin: int, window: int) -> PagedCall:
        count = run.end - run.begin
        # A prompt's first chunk sees itself alone, so its keys are not read from blocks.
        if not run.begin and not 0 < window < count:
            return PagedCall(begin, 1, count, None, None)
        first = self._first_block(run.begin, window)
        number = -(-run.end // self._cache.size) - first
        band = SeenBand(run.end - first * self._cache.size, window)
        return PagedCall(begin, 1, count, self._table([run.sequence.table[first : first + number]], number), None, band)

    def _table(self, blocks: list[list[int]], number: int) -> Tensor | slice:
        """Return (B, number) padded with the zero block, or a slice of blocks for one sequence with consecutive blocks.

        Blocks behind that slice belong to others, and could contain numbers that are not finite.
        """
        table = blocks[0]
        if len(blocks) == 1 and table == list(range(table[0], table[0] + number)):
            return slice(table[0], table[0] + number)
        zero = self._cache.zero
        return to_device([table + [zero] * (number - len(table)) for table in blocks], self._cache.device)

    def _bias(self, positions: list[int], keys: int, window: int) -> Tensor:
        """Return (rows, 1, keys) fp32 for queries at positions among the keys."""
        query = to_device(positions, self._cache.device)[:, None]
        key = torch.arange(keys, device=self._cache.device)
        seen = key <= query
        if window:
            seen &= key > query - window
        return torch.zeros(seen.shape, dtype=torch.float32, device=seen.device).masked_fill_(~seen, HIDDEN)[:, None]


ALIGNED = 16
"""Alignment of each part of a copy, in numbers. A Triton kernel is compiled anew for other addresses."""


def _copy_to_device(
    rows: Sequence[list[int]], parts: Sequence[list[int]], device: torch.device
) -> tuple[Tensor, Sequence[Tensor]]:
    """Copy lists of one length as (lists, N) int64 to the device, together with other lists, all at once."""
    # One copy for all lists: each copy to a device is a call of its own, and pins memory of its own.
    packed, starts = array("q"), list[int]()
    for part in (*rows, *parts):
        starts.append(len(packed))
        packed.fromlist(part)
        packed.frombytes(bytes(packed.itemsize * (-len(part) % ALIGNED)))
    on_device, width = to_device(packed, device, torch.int64), len(rows[0])
    numbers = on_device[: starts[len(rows)]].view(len(rows), -1)[:, :width]
    ends = (begin + len(part) for begin, part in zip(starts[len(rows) :], parts, strict=True))
    return numbers, [on_device[begin:end] for begin, end in zip(starts[len(rows) :], ends, strict=True)]


def _with_starts(runs: Sequence[Run], begin: int) -> Iterable[tuple[Run, int]]:
    for run in runs:
        yield run, begin
        begin += run.end - run.begin
