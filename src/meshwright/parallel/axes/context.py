"""Context parallelism, first half: which rank holds which positions, and which keys its queries see.

Each rank holds S / c positions of every sequence. Late positions see more keys than early ones, so the sequence is cut
into 2 c chunks, and rank i holds chunks i and 2 c - 1 - i. Then each rank has the same work with the keys of each other
rank (zig-zag: Llama 3 report, arXiv:2407.21783, section 3.3.2). Or rank i holds positions i, i + c, i + 2 c ...
(striped: arXiv:2311.09431), and every pair of ranks is causal by itself. How keys get to the queries that see them is
the second half, `ring.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.attention.attend import UNKNOWN, DocumentSpans, Mask
from meshwright.kernels.attention.partial import COLUMNS, ROWS, Tile
from meshwright.parallel.groups.group import Group
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.layout import check_word


@dataclass(frozen=True, slots=True)
class Places:
    """Positions of a sequence that a rank holds: from each of the ascending `starts`, `length`, `step` apart."""

    starts: tuple[int, ...]
    length: int
    step: int = 1

    def count_up_to(self, position: int) -> int:
        """Return the number of held positions that are at `position` or before it."""
        return sum(min(max((position - start) // self.step + 1, 0), self.length) for start in self.starts)

    def pieces(self, rows: int) -> Iterator[tuple[slice, int]]:
        """Yield (slice of the held positions, first position) of runs of at most `rows`, `step` apart."""
        for chunk, start in enumerate(self.starts):
            for at in range(0, self.length, rows):
                first = chunk * self.length + at
                yield slice(first, first + min(rows, self.length - at)), start + at * self.step

    def positions(self, begin: int, end: int, device: torch.device | None = None) -> Tensor:
        """Return the held positions with numbers `begin` to `end`: (end - begin,) int64."""
        parts = []
        for chunk, start in enumerate(self.starts):
            low, high = max(begin - chunk * self.length, 0), min(end - chunk * self.length, self.length)
            if low < high:
                parts.append(torch.arange(low, high, device=device) * self.step + start)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def places(sequence: int, size: int, index: int, split: str) -> Places:
    """Return the positions that rank `index` of `size` holds of `sequence` positions.

    Raises IllegalLayout when `split` is no word of layout.context_split, or the sequence cannot be cut that way.
    """
    check_word("context_split", split)
    chunks = 2 * size if split == "zigzag" else size
    if sequence % chunks:
        way = f"2 x layout.cp={size} chunks (zig-zag)" if split == "zigzag" else f"layout.cp={size} chunks"
        nearest = max(1, round(sequence / chunks)) * chunks
        raise IllegalLayout(f"recipe.sequence={sequence} cannot be cut into {way}: take recipe.sequence={nearest}")
    length = sequence // chunks
    if split == "striped":
        return Places((index,), length, size)
    return Places((index * length, (chunks - 1 - index) * length) if split == "zigzag" else (index * length,), length)


class _WholeSums(torch.autograd.Function):
    """Sum over the ranks, without a collective in the backward pass.

    Each rank contributes the same loss divided by their number. So the gradient that the ranks would send each other is
    each rank's gradient times that number.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: Group) -> Tensor:
        ctx.size = group.size
        return group.all_reduce(sums.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.size, None


def whole_sums(sums: Tensor, group: Group) -> Tensor:
    """Add this rank's sums over its positions up to sums over whole sequences, on every rank of the group."""
    whole: Tensor = _WholeSums.apply(sums, group)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return whole


def take_at(x: Tensor, at: Places, dim: int) -> Tensor:
    """Return the held positions `at` of a whole sequence along `dim`."""
    if at.step > 1:
        return x.index_select(dim, at.positions(0, at.length, x.device))
    return torch.cat([x.narrow(dim, start, at.length) for start in at.starts], dim)


def join_parts(parts: Sequence[Tensor], split: str, dim: int) -> Tensor:
    """Join the ranks' parts, each (..., S / c, ...), to the whole sequence (..., S, ...) along `dim`."""
    # Position p is held by rank p % c, so the ranks' positions alternate.
    if split == "striped":
        return torch.stack(list(parts), dim + 1).flatten(dim, dim + 1)
    size, count = len(parts), parts[0].shape[dim]
    held = [places(size * count, size, index, split) for index in range(size)]
    chunks = [
        (start, part.narrow(dim, number * at.length, at.length))
        for part, at in zip(parts, held, strict=True)
        for number, start in enumerate(at.starts)
    ]
    return torch.cat([chunk for _, chunk in sorted(chunks, key=lambda pair: pair[0])], dim)


@dataclass(frozen=True, slots=True)
class ContextMask(Mask):
    """Mask between this rank's queries and any keys, as tiles.

    A query sees the keys of its document, from `window` - 1 positions before it to itself. `bounds` (B, S / c) on the
    host: the position where each query's document begins. None = the start of the sequence.
    """

    queries: Places = Places((0,), 0)
    sequence: int = 0
    split: str = "zigzag"
    device: torch.device | None = None
    bounds: Tensor | None = None

    @staticmethod
    def make(
        group: Group, queries: Places, split: str, device: torch.device | None, bounds: Tensor | None, window: int
    ) -> "ContextMask":
        """Make the mask for the queries of a rank of `group`."""
        sequence = len(queries.starts) * queries.length * group.size
        return ContextMask(queries=queries, sequence=sequence, split=split, device=device, bounds=bounds, window=window)

    def keys_of(self, size: int, index: int) -> Places:
        """Return the positions of a rank's keys."""
        return places(self.sequence, size, index, self.split)

    def blocks(self, keys: Places, rows: int = ROWS, columns: int = COLUMNS) -> Iterator[Tile]:
        """Yield tiles of at most `rows` queries and `columns` keys, without keys that none of the queries sees."""
        firsts = self.firsts()
        lowest, highest = self._over_rows(firsts)
        for queries, start in self.queries.pieces(rows):
            # Keys ascend in position: from the first one that the first query sees to the last that the last one sees.
            first = keys.count_up_to(lowest[queries.start] - 1) if lowest else 0
            last = keys.count_up_to(start + (queries.stop - queries.start - 1) * self.queries.step)
            for begin in range(first, last, columns):
                end = min(begin + columns, last)
                hidden = (
                    *self._too_early(keys, queries, begin, end, firsts, highest),
                    *self._too_late(keys, queries, start, begin, end),
                )
                yield Tile(queries=queries, keys=slice(begin, end), hidden=hidden)

    def chunks(self, keys: Places, most: int = 0) -> Iterator[Tile]:
        """Yield tiles without masks.

        Queries of one document see the same keys of that document, or each sees one more key than the query before it:
        then those are a causal tile. With a window, each query also sees one key less at the other end, if the keys are
        consecutive. Tiles then have at most `most` queries (0 = any number).
        """
        if self.window:
            for run in self._runs(most):
                yield from self._bands(keys, *run)
            return
        for rows, queries, start, first in self._runs():
            begin, seen = keys.count_up_to(first - 1), keys.count_up_to(start)
            end = keys.count_up_to(start + (queries.stop - queries.start - 1) * self.queries.step)
            # All queries see the keys before `whole`. From there on each query sees one more, which makes a triangle.
            whole = seen if seen == end else max(seen - 1, begin)
            if begin < whole:
                yield Tile(rows=rows, queries=queries, keys=slice(begin, whole))
            if whole < end:  # in a later stripe the first query may see no key at all
                after = slice(queries.stop - (end - whole), queries.stop)
                yield Tile(rows=rows, queries=after, keys=slice(whole, end), right=0)

    def _bands(self, keys: Places, rows: slice, queries: slice, start: int, first: int) -> Iterator[Tile]:
        """Yield what a run of queries, the first at `start`, sees of each chunk of keys.

        In keys of the chunk, query i sees those from max(`begin`, `near` + i) to `last` + i, or to the end of the
        chunk.
        """
        count = queries.stop - queries.start
        for chunk, origin in enumerate(keys.starts):
            begin = max(0, -((origin - first) // keys.step))
            near = -((origin - (start - self.window + 1)) // keys.step)
            last = (start - origin) // keys.step
            # Queries that see any key of this chunk, and the keys that any of them sees.
            low, high = max(0, begin - last), min(count, keys.length - near)
            if low >= high or near > last or begin >= keys.length:
                continue
            from_key, to_key = max(begin, near + low), min(keys.length, last + high)
            # Borders as Tile counts them, from its last key. One that hides nothing becomes -1, which costs no mask.
            left, right = to_key - high - near, last + high - to_key
            offset = chunk * keys.length
            yield Tile(
                rows=rows, queries=slice(queries.start + low, queries.start + high),
                keys=slice(offset + from_key, offset + to_key),
                left=left if left < to_key - from_key - 1 else -1, right=right if right < high - low - 1 else -1,
            )  # fmt: skip

    def firsts(self) -> Tensor | None:
        """Return the first position that each query sees (B or 1, S / c). None = the start of the sequence."""
        if not self.window:
            return self.bounds
        held = self.queries.positions(0, len(self.queries.starts) * self.queries.length, torch.device("cpu"))
        near = (held - (self.window - 1)).clamp(min=0)
        return near[None] if self.bounds is None else torch.maximum(self.bounds, near)

    def _over_rows(self, firsts: Tensor | None) -> tuple[list[int], list[int]]:
        """Return each query's lowest and highest first position over the rows of the batch."""
        if firsts is None:
            return [], []
        if compat.is_fake(firsts):  # a dry run has no documents, so all rows are alike
            length, step = self.queries.length, self.queries.step
            every = (at for start in self.queries.starts for at in range(start, start + length * step, step))
            firsts_of_all = [max(0, at - self.window + 1) for at in every]
            return firsts_of_all, firsts_of_all
        return firsts.amin(0).tolist(), firsts.amax(0).tolist()

    def _runs(self, most: int = 0) -> Iterator[tuple[slice, slice, int, int]]:
        """Yield (rows, queries, their first position, where their document begins) for runs of one document."""
        for queries, start in self.queries.pieces(most or self.queries.length):
            if self.bounds is None:
                yield slice(None), queries, start, 0
                continue
            for row, firsts in enumerate(self.bounds[:, queries]):
                changes = (firsts.diff().nonzero().flatten() + 1).tolist()
                for begin, end in pairwise([0, *changes, len(firsts)]):
                    run = slice(queries.start + begin, queries.start + end)
                    yield slice(row, row + 1), run, start + begin * self.queries.step, int(firsts[begin])

    def _too_early(
        self, keys: Places, queries: slice, begin: int, end: int, firsts: Tensor | None, highest: list[int]
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the mask of keys that window or documents hide from a part of the queries."""
        if firsts is None:
            return
        # Before `common` at least one query is blind; behind it all see the keys, and no mask is needed.
        common = min(keys.count_up_to(highest[queries.stop - 1] - 1), end)
        if begin < common:
            positions = keys.positions(begin, common, self.device)
            first = firsts[:, queries, None].to(self.device, non_blocking=True)
            yield slice(0, common - begin), positions < first

    def _too_late(
        self, keys: Places, queries: slice, start: int, begin: int, end: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the mask of keys that causality hides from a part of the queries, the first of which is at `start`."""
        # Every query is at `start` or later, so only keys after it can be hidden.
        past = max(keys.count_up_to(start), begin)
        if past < end:
            positions = torch.arange(queries.stop - queries.start, device=self.device) * self.queries.step + start
            yield slice(past - begin, end - begin), keys.positions(past, end, self.device) > positions[:, None]


def mask_maker(group: Group, split: str) -> Callable[..., Mask]:
    """Return the replacement of kernels.attention.attend.causal_mask, for sequences that are c times the queries.

    Documents (B, S / c) are those of this rank's positions: neighbours with equal numbers are one document. The host
    knows where they begin, since it reads whole rows. When `spans` does not tell it, the numbers are gathered from all
    ranks: a collective that the host waits for, once a pass and kind of layer.
    """

    def make(
        queries: int,
        keys: int,
        *,
        window: int = 0,
        documents: Tensor | None = None,
        spans: DocumentSpans = UNKNOWN,
        device: torch.device | None = None,
    ) -> Mask:
        if keys != queries:
            raise IllegalLayout(
                f"{queries} queries of {keys} positions: layout.cp={group.size} cuts whole sequences and keeps no "
                "past keys; generate with layout.cp=1"
            )
        sequence = queries * group.size
        mine = places(sequence, group.size, group.index, split)
        # A window as long as the sequence hides nothing.
        window = window if window < sequence else 0
        begins = None if documents is None else _begins(group, mine, split, documents, spans)
        return ContextMask.make(group, mine, split, device, begins, window)

    return make


def _begins(group: Group, mine: Places, split: str, documents: Tensor, spans: DocumentSpans) -> Tensor:
    """Return the position where the document of each of this rank's positions begins, (B, S / c) on the host."""
    if spans.begins:
        held = mine.positions(0, len(mine.starts) * mine.length, torch.device("cpu"))
        rows = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in spans.begins]
        return torch.stack([row[torch.searchsorted(row, held, right=True) - 1] for row in rows])
    whole = join_parts(group.all_gather(documents, 1).chunk(group.size, 1), split, 1).cpu()  # waits for the device
    # A document begins where the number differs from its neighbour's; positions inherit the latest beginning.
    changes = torch.ones_like(whole, dtype=torch.bool)
    changes[:, 1:] = whole[:, 1:] != whole[:, :-1]
    starts = torch.arange(whole.shape[1], device="cpu").where(changes, 0).cummax(1).values
    return take_at(starts, mine, 1)
