"""Context parallelism, first half: who holds which positions, and who sees whom.

Of every sequence each rank holds S / c positions. Causal attention gives late positions more to do than early ones, so
the sequence is cut in 2 c chunks of which rank i holds number i and number 2 c - 1 - i (zig-zag: Llama 3 report,
arXiv:2407.21783, section 3.3.2): then each rank has the same work with the keys of each other rank. Or rank i holds
positions i, i + c, i + 2 c ... (striped: arXiv:2311.09431), where every pair of ranks is causal by itself. How keys get
to the queries that see them is the second half, `ring.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.attention import UNKNOWN, DocumentSpans, Mask
from meshwright.kernels.partial import COLUMNS, ROWS, Tile
from meshwright.parallel.group import Group
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout import known_word


@dataclass(frozen=True, slots=True)
class Places:
    """Positions of the sequence: `length` from each of `starts`, which ascend, every `step`-th."""

    starts: tuple[int, ...]
    length: int
    step: int = 1

    def upto(self, position: int) -> int:
        """How many of these places are at `position` or before it."""
        return sum(min(max((position - start) // self.step + 1, 0), self.length) for start in self.starts)

    def pieces(self, rows: int) -> Iterator[tuple[slice, int]]:
        """(which places, position of the first): runs of at most `rows` that lie `step` apart."""
        for chunk, start in enumerate(self.starts):
            for at in range(0, self.length, rows):
                first = chunk * self.length + at
                yield slice(first, first + min(rows, self.length - at)), start + at * self.step

    def positions(self, begin: int, end: int, device: torch.device | None = None) -> Tensor:
        """Those of places `begin` to `end` (end - begin,) int64."""
        parts = []
        for chunk, start in enumerate(self.starts):
            low, high = max(begin - chunk * self.length, 0), min(end - chunk * self.length, self.length)
            if low < high:
                parts.append(torch.arange(low, high, device=device) * self.step + start)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def places(sequence: int, size: int, index: int, split: str) -> Places:
    """What rank `index` of `size` holds of `sequence` positions. `split` is a word of layout.context_split; another one
    is an IllegalLayout, and so is a sequence that cannot be cut that way."""
    known_word("context_split", split)
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
    """The sum over the ranks. Each contributes the same loss divided by their number, so that the gradient which they
    would send each other is its own times that: the backward pass needs no collective."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: Group) -> Tensor:
        ctx.size = group.size
        return group.all_reduce(sums.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.size, None


def whole_sums(sums: Tensor, group: Group) -> Tensor:
    """Sums over this rank's positions -> over whole sequences, on every rank of the group."""
    found: Tensor = _WholeSums.apply(sums, group)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return found


def take_at(x: Tensor, at: Places, dim: int) -> Tensor:
    """These places of a whole sequence that lies along `dim`."""
    if at.step > 1:
        return x.index_select(dim, at.positions(0, at.length, x.device))
    return torch.cat([x.narrow(dim, start, at.length) for start in at.starts], dim)


def in_order(parts: Sequence[Tensor], split: str, dim: int) -> Tensor:
    """The ranks' parts, each (..., S / c, ...), as the whole sequence (..., S, ...) along `dim`."""
    if split == "striped":
        return torch.stack(list(parts), dim + 1).flatten(dim, dim + 1)
    size, count = len(parts), parts[0].shape[dim]
    held = [places(size * count, size, index, split) for index in range(size)]
    chunks = [
        (start, part.narrow(dim, place * at.length, at.length))
        for part, at in zip(parts, held, strict=True)
        for place, start in enumerate(at.starts)
    ]
    return torch.cat([chunk for _, chunk in sorted(chunks, key=lambda found: found[0])], dim)


@dataclass(frozen=True, slots=True)
class ContextMask(Mask):
    """What this rank's queries see of any keys, told as tiles: those of a position's own document, from `window` - 1
    before it to itself.

    `bounds` (B, S / c), on the host: where each position's document begins; None = at the start of the sequence.
    """

    queries: Places = Places((0,), 0)
    sequence: int = 0
    split: str = "zigzag"
    device: torch.device | None = None
    bounds: Tensor | None = None

    @staticmethod
    def of(
        group: Group, queries: Places, split: str, device: torch.device | None, bounds: Tensor | None, window: int
    ) -> "ContextMask":
        """For these queries of a rank of `group`."""
        sequence = len(queries.starts) * queries.length * group.size
        return ContextMask(queries=queries, sequence=sequence, split=split, device=device, bounds=bounds, window=window)

    def keys_of(self, size: int, index: int) -> Places:
        """Where the keys of a rank lie."""
        return places(self.sequence, size, index, self.split)

    def blocks(self, keys: Places, rows: int = ROWS, columns: int = COLUMNS) -> Iterator[Tile]:
        """Tiles of at most `rows` queries and `columns` keys; keys that none of the queries sees are left out."""
        firsts = self.firsts()
        lowest, highest = self._over_rows(firsts)
        for queries, start in self.queries.pieces(rows):
            first = keys.upto(lowest[queries.start] - 1) if lowest else 0
            last = keys.upto(start + (queries.stop - queries.start - 1) * self.queries.step)
            for begin in range(first, last, columns):
                end = min(begin + columns, last)
                hidden = (
                    *self._too_early(keys, queries, begin, end, firsts, highest),
                    *self._too_late(keys, queries, start, begin, end),
                )
                yield Tile(queries=queries, keys=slice(begin, end), hidden=hidden)

    def chunks(self, keys: Places, most: int = 0) -> Iterator[Tile]:
        """Tiles without masks; with a window, of at most `most` queries each (0 = of any number). A run of queries of
        one document sees the same keys of that document, or each one more than the query before it: then those are a
        causal tile. With a window each sees one key less at the other end, too, of keys that follow each other."""
        if self.window:
            for run in self._runs(most):
                yield from self._bands(keys, *run)
            return
        for rows, queries, start, first in self._runs():
            begin, seen = keys.upto(first - 1), keys.upto(start)
            end = keys.upto(start + (queries.stop - queries.start - 1) * self.queries.step)
            whole = seen if seen == end else max(seen - 1, begin)
            if begin < whole:
                yield Tile(rows=rows, queries=queries, keys=slice(begin, whole))
            if whole < end:  # of stripes that come later the first query sees nothing
                after = slice(queries.stop - (end - whole), queries.stop)
                yield Tile(rows=rows, queries=after, keys=slice(whole, end), right=0)

    def _bands(self, keys: Places, rows: slice, queries: slice, start: int, first: int) -> Iterator[Tile]:
        """What a run of queries, the first at `start`, sees of each chunk of keys, counted in keys of the chunk: query
        i those from the larger of `begin` and `near` + i to `last` + i, or to the chunk's end."""
        count = queries.stop - queries.start
        for chunk, origin in enumerate(keys.starts):
            begin = max(0, -((origin - first) // keys.step))
            near = -((origin - (start - self.window + 1)) // keys.step)
            last = (start - origin) // keys.step
            low, high = max(0, begin - last), min(count, keys.length - near)
            if low >= high or near > last or begin >= keys.length:
                continue
            from_key, to_key = max(begin, near + low), min(keys.length, last + high)
            left, right = to_key - high - near, last + high - to_key
            here = chunk * keys.length
            yield Tile(
                rows=rows, queries=slice(queries.start + low, queries.start + high),
                keys=slice(here + from_key, here + to_key),
                left=left if left < to_key - from_key - 1 else -1, right=right if right < high - low - 1 else -1,
            )  # fmt: skip

    def firsts(self) -> Tensor | None:
        """The first position that each of this rank's positions sees (B or 1, S / c); None = that of the sequence."""
        if not self.window:
            return self.bounds
        held = self.queries.positions(0, len(self.queries.starts) * self.queries.length, torch.device("cpu"))
        near = (held - (self.window - 1)).clamp(min=0)
        return near[None] if self.bounds is None else torch.maximum(self.bounds, near)

    def _over_rows(self, firsts: Tensor | None) -> tuple[list[int], list[int]]:
        """The lowest and the highest first position of each query."""
        if firsts is None:
            return [], []
        if compat.is_fake(firsts):  # a dry run, which has no documents here: all rows are alike
            length, step = self.queries.length, self.queries.step
            every = (at for start in self.queries.starts for at in range(start, start + length * step, step))
            found = [max(0, at - self.window + 1) for at in every]
            return found, found
        return firsts.amin(0).tolist(), firsts.amax(0).tolist()

    def _runs(self, most: int = 0) -> Iterator[tuple[slice, slice, int, int]]:
        """(rows, queries, their first position, that of their document): neighbours of one document."""
        for queries, start in self.queries.pieces(most or self.queries.length):
            if self.bounds is None:
                yield slice(None), queries, start, 0
                continue
            for row, firsts in enumerate(self.bounds[:, queries]):
                changes = (firsts.diff().nonzero().flatten() + 1).tolist()
                for begin, end in pairwise([0, *changes, len(firsts)]):
                    here = slice(queries.start + begin, queries.start + end)
                    yield slice(row, row + 1), here, start + begin * self.queries.step, int(firsts[begin])

    def _too_early(
        self, keys: Places, queries: slice, begin: int, end: int, firsts: Tensor | None, highest: list[int]
    ) -> Iterator[tuple[slice, Tensor]]:
        """Window and documents hide, from some of the queries, keys before the last one's first."""
        if firsts is None:
            return
        common = min(keys.upto(highest[queries.stop - 1] - 1), end)
        if begin < common:
            positions = keys.positions(begin, common, self.device)
            first = firsts[:, queries, None].to(self.device, non_blocking=True)
            yield slice(0, common - begin), positions < first

    def _too_late(
        self, keys: Places, queries: slice, start: int, begin: int, end: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """Causality hides, from some of the queries, keys after the first one, which is at position `start`."""
        past = max(keys.upto(start), begin)
        if past < end:
            here = torch.arange(queries.stop - queries.start, device=self.device) * self.queries.step + start
            yield slice(past - begin, end - begin), keys.positions(past, end, self.device) > here[:, None]


def mask_maker(group: Group, split: str) -> Callable[..., Mask]:
    """What takes the place of kernels.attention.causal_mask, with its signature; sequences are c times the queries.

    Documents (B, S / c) are those of this rank's positions, neighbours with equal numbers being one document. Where
    they begin is known on the host: it reads whole rows. Where `spans` does not say it, their numbers are gathered from
    all ranks, once a pass and kind of layer: a collective, for which the host waits.
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
        window = window if window < sequence else 0
        begins = None if documents is None else _begins(group, mine, split, documents, spans)
        return ContextMask.of(group, mine, split, device, begins, window)

    return make


def _begins(group: Group, mine: Places, split: str, documents: Tensor, spans: DocumentSpans) -> Tensor:
    """Where the document of each of this rank's positions begins (B, S / c), on the host."""
    if spans.begins:
        held = mine.positions(0, len(mine.starts) * mine.length, torch.device("cpu"))
        rows = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in spans.begins]
        return torch.stack([row[torch.searchsorted(row, held, right=True) - 1] for row in rows])
    whole = in_order(group.all_gather(documents, 1).chunk(group.size, 1), split, 1).cpu()  # waits for a device
    changes = torch.ones_like(whole, dtype=torch.bool)
    changes[:, 1:] = whole[:, 1:] != whole[:, :-1]
    starts = torch.arange(whole.shape[1], device="cpu").where(changes, 0).cummax(1).values
    return take_at(starts, mine, 1)
