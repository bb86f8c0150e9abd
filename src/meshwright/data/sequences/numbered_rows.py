"""Numbered rows of a corpus: windows of its text, its samples packed, or those of several sources interleaved."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from meshwright.data.corpus.corpus import Corpus, MixedStream, Stream
from meshwright.data.sequences.sample_rows import SampleRows
from meshwright.data.sequences.windows import NumberedRows as NumberedRows
from meshwright.data.sequences.windows import Sampler, Sequences
from meshwright.spec import Data, Recipe
from meshwright.spec.errors import DataError
from meshwright.spec.recipe.recipe import CROSS_ENTROPY, PREFERENCES

PERIOD: Final = 2**16
"""The longest table."""


@final
class Interleaving:
    """Source of each row of a mixture, for any row number directly. It depends on the shares alone.

    Shares are fractions a / D. The order of sources repeats every D rows, D at most 2**16, so a table of D rows
    suffices. Row j of a source may take slots from floor(j D / a) to ceil((j + 1) D / a) - 1. The earliest deadline
    goes first. Then no source is ever a whole row ahead of its share or behind it (Steiner and Yeomans 1993, "Level
    schedules for mixed-model, just-in-time processes"; Tijdeman 1980).
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        """Build the table from shares above 0, rounded if no table of PERIOD rows has them exactly."""
        self._counts: Final = _counts(shares)
        sources, numbers = _table(self._counts)
        self._sources: Final = sources
        self._numbers: Final = numbers
        self._each: Final = np.array(self._counts, dtype=np.int64)

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Exact share of each source in the table."""
        return tuple(Fraction(count, len(self._sources)) for count in self._counts)

    def locate(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each row of the mixture and its number within that source: [N] -> [N], [N]."""
        periods, places = np.divmod(rows, len(self._sources))
        sources = self._sources[places].astype(np.int64)
        return sources, periods * self._each[sources] + self._numbers[places]

    def counts(self, rows: int) -> tuple[int, ...]:
        """Return how many of the first `rows` rows each source has."""
        periods, rest = divmod(rows, len(self._sources))
        tail = np.bincount(self._sources[:rest], minlength=len(self._counts))
        return tuple((periods * self._each + tail).tolist())


def _counts(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the rows of each source in the table: exact if possible, else by largest remainders and at least one."""
    whole = sum(shares, Fraction(0))
    parts = [share / whole for share in shares]
    period = lcm(*(part.denominator for part in parts))
    if period <= PERIOD:
        return tuple(int(part * period) for part in parts)
    counts = [max(1, int(part * PERIOD)) for part in parts]
    by_need = sorted(range(len(parts)), key=lambda source: counts[source] - parts[source] * PERIOD)
    missing = PERIOD - sum(counts)
    for source in by_need[: max(0, missing)]:
        counts[source] += 1
    for _ in range(-missing):  # many tiny shares were raised to one row
        counts[max(range(len(counts)), key=counts.__getitem__)] -= 1
    return tuple(counts)


def _table(counts: Sequence[int]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Return (source of each row, earlier rows of that source), [D] each, by the earliest deadline."""
    period = sum(counts)
    sources, numbers = np.empty(period, np.uint16), np.empty(period, np.int64)
    waiting = [(0, source) for source in range(len(counts))]  # (first slot of its next row, source)
    ready: list[tuple[int, int]] = []  # (last slot of its next row, source)
    done = [0] * len(counts)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(done[source] + 1) * period // counts[source]) - 1, source))
        source = heapq.heappop(ready)[1]
        sources[slot], numbers[slot] = source, done[source]
        done[source] += 1
        if done[source] < counts[source]:
            heapq.heappush(waiting, (done[source] * period // counts[source], source))
    return sources, numbers


@final
class MixedRows:
    """Training order of a mixture: row c of a run is row j of source s, both from `Interleaving.locate(c)`.

    A source goes through its own epochs, each in another order. One epoch of the mixture has as many rows as all
    sources.
    """

    def __init__(self, rows: Sequence[NumberedRows], weights: Sequence[float]) -> None:
        """Take the rows of the sources, and their shares of trained tokens or pairs."""
        self.rows: Final = tuple(rows)
        self.weights: Final = tuple(weights)

    @cached_property
    def interleaving(self) -> Interleaving:
        """Source of each row. Every source has a row."""
        rows = zip(self.rows, self.weights, strict=True)
        return Interleaving([Fraction(repr(weight)) / _trained_per_row(source_rows) for source_rows, weight in rows])

    def __len__(self) -> int:
        """Rows of all sources together."""
        return sum(map(len, self.rows))

    def take(self, cursor: int, count: int) -> Sequences:
        """Return rows [cursor, cursor + count) of the run. Those of each source are consecutive rows of it."""
        sources, numbers = self.interleaving.locate(np.arange(cursor, cursor + count, dtype=np.int64))
        batches = []
        order = np.argsort(sources, kind="stable")
        for source in np.unique(sources).tolist():
            own_numbers = numbers[sources == source]
            batches.append(self.rows[source].take(int(own_numbers[0]), len(own_numbers)))
        together, places = concatenate(batches), np.empty_like(order)
        places[order] = np.arange(count)
        return together.rows(places)

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """Yield the rows of the first source, then of the next, `count` at a time (fewer at the end).

        `limit` > 0 takes this many rows, divided among sources by their shares, at least one each.
        """
        waiting: list[Sequences] = []
        for source_rows, most in zip(self.rows, divide_limit(self.weights, limit), strict=True):
            for batch in source_rows.windows_in_order(count, limit=most):
                waiting.append(batch)
                if sum(len(part.tokens) for part in waiting) >= count:
                    whole = concatenate(waiting)
                    yield whole.rows(slice(0, count))
                    waiting = [whole.rows(slice(count, None))] if len(whole.tokens) > count else []
        if waiting:
            yield concatenate(waiting)


def divide_limit(weights: Sequence[float], limit: int) -> list[int]:
    """Divide `limit` rows of an evaluation among sources by weight, at least one each. 0 = all rows."""
    return [max(1, round(limit * weight / sum(weights))) if limit else 0 for weight in weights]


def concatenate(batches: Sequence[Sequences]) -> Sequences:
    """Concatenate batches along their rows. The result is `packed` if any is."""
    if len(batches) == 1:
        return batches[0]
    parts = {field.name: [getattr(batch, field.name) for batch in batches] for field in fields(Sequences)}
    packed = any(parts.pop("packed"))
    arrays: dict[str, Any] = {
        name: None if columns[0] is None else np.concatenate(columns) for name, columns in parts.items()
    }
    return Sequences(packed=packed, **arrays)


def _trained_per_row(rows: NumberedRows) -> Fraction:
    """Return the trained tokens, or pairs, per row. Windows of text have equally many tokens, counted as 1."""
    if not isinstance(rows, SampleRows):
        return Fraction(1)
    return Fraction(rows.fitted.retained if rows.pairs else rows.fitted.trained, len(rows))


def check_objective(data: Data, recipe: Recipe, pairs: bool | None) -> None:
    """Raise DataError if an objective over pairs has no pairs, or another has them. `pairs` = None without rows."""
    named = f"data.path={data.path}" if data.path else f"data={data.title}"
    if pairs and not recipe.traits.pairs:
        raise DataError(
            f"{named} holds preferences (chosen and rejected), and recipe.objective={recipe.objective} "
            f"compares nothing: take recipe.objective={PREFERENCES[0]}, or another of {', '.join(PREFERENCES)}"
        )
    if recipe.traits.pairs and pairs is False:
        raise DataError(
            f"recipe.objective={recipe.objective} compares answers, and {named} has no columns chosen and "
            f"rejected: take recipe.objective={CROSS_ENTROPY}, or a file with pairs"
        )


def check_alike(data: Data, pairs: Sequence[bool | None]) -> None:
    """Raise DataError if only some sources of a mixture hold preferences. `pairs` = None for one without rows."""
    named = {kind: source.path for source, kind in zip(data.mixture, pairs, strict=False) if kind is not None}
    if len(named) > 1:
        raise DataError(
            f"data.mixture: {named[True]} holds preferences (chosen and rejected), and {named[False]} does "
            "not: tune on them one after the other, in two runs"
        )


def numbered_rows(data: Data, recipe: Recipe, corpus: Corpus, stream: Stream, *, shuffle: bool) -> NumberedRows:
    """Return the rows of a stream. Raises DataError for less than one row, or for an objective for other data."""
    pairs_by_source = [part.pairs if len(part.starts) else None for part in corpus.train.parts]
    check_alike(data, pairs_by_source)
    pairs = None if set(pairs_by_source) <= {None} else any(pairs_by_source)
    check_objective(data, recipe, pairs)
    if isinstance(stream, MixedStream):
        return MixedRows(list(_rows_by_source(data, recipe, corpus, stream, shuffle)), stream.weights)
    if stream.marks is not None:
        return SampleRows(stream, data, corpus.tokenizer, sequence=recipe.sequence, seed=recipe.seed, shuffle=shuffle)
    if stream.is_stored:
        from meshwright.data.sequences.stored_rows import StoredRows
        from meshwright.data.stored.shard_cache import StoredStream

        assert isinstance(stream, StoredStream), "the only kind of stream that is stored"
        return StoredRows(
            stream, sequence=recipe.sequence, tokenizer_separator=corpus.tokenizer.separator, seed=recipe.seed,
            shuffle=shuffle,
        )  # fmt: skip
    return Sampler(
        stream,
        sequence=recipe.sequence,
        tokenizer_separator=corpus.tokenizer.separator,
        seed=recipe.seed,
        shuffle=shuffle,
    )


def _rows_by_source(
    data: Data, recipe: Recipe, corpus: Corpus, stream: MixedStream, shuffle: bool
) -> Iterator[NumberedRows]:
    """Yield the rows of each source of a mixture. Raises DataError naming the source."""
    for source, part in zip(data.sources, stream.parts, strict=True):
        try:
            yield numbered_rows(source, recipe, corpus, part, shuffle=shuffle)
        except DataError as error:
            named = f"data.path={source.path}"
            raise DataError(str(error) if named in str(error) else f"{named}: {error}") from error
