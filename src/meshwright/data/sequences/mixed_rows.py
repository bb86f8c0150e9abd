"""Rows of a mixture: every row belongs to one of its sources, in the order that the weights give."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import cached_property
from typing import Any, Final, final

import numpy as np

from meshwright.data.sequences.interleaving import Interleaving
from meshwright.data.sequences.sample_rows import SampleRows
from meshwright.data.sequences.windows import NumberedRows, Sequences


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
        return Interleaving([Fraction(repr(weight)) / _counted_in_a_row(source_rows) for source_rows, weight in rows])

    def __len__(self) -> int:
        """Rows of all sources together."""
        return sum(map(len, self.rows))

    def take(self, cursor: int, count: int) -> Sequences:
        """Return rows [cursor, cursor + count) of the run. Those of each source are consecutive rows of it."""
        sources, numbers = self.interleaving.locate(np.arange(cursor, cursor + count, dtype=np.int64))
        batches = []
        order = np.argsort(sources, kind="stable")
        for source in np.unique(sources).tolist():
            here = numbers[sources == source]
            batches.append(self.rows[source].take(int(here[0]), len(here)))
        together, places = joined(batches), np.empty_like(order)
        places[order] = np.arange(count)
        return together.rows(places)

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """Yield the rows of the first source, then of the next, `count` at a time (fewer at the end).

        `limit` > 0 takes this many rows, divided among sources by their shares, at least one each.
        """
        waiting: list[Sequences] = []
        for source_rows, most in zip(self.rows, limits(self.weights, limit), strict=True):
            for batch in source_rows.windows_in_order(count, limit=most):
                waiting.append(batch)
                if sum(len(part.tokens) for part in waiting) >= count:
                    whole = joined(waiting)
                    yield whole.rows(slice(0, count))
                    waiting = [whole.rows(slice(count, None))] if len(whole.tokens) > count else []
        if waiting:
            yield joined(waiting)


def limits(weights: Sequence[float], limit: int) -> list[int]:
    """Divide `limit` rows of an evaluation among sources by weight, at least one each. 0 = all rows."""
    return [max(1, round(limit * weight / sum(weights))) if limit else 0 for weight in weights]


def joined(batches: Sequence[Sequences]) -> Sequences:
    """Concatenate batches along their rows. The result is `packed` if any is."""
    if len(batches) == 1:
        return batches[0]
    parts = {field.name: [getattr(batch, field.name) for batch in batches] for field in fields(Sequences)}
    packed = any(parts.pop("packed"))
    arrays: dict[str, Any] = {name: None if each[0] is None else np.concatenate(each) for name, each in parts.items()}
    return Sequences(packed=packed, **arrays)


def _counted_in_a_row(rows: NumberedRows) -> Fraction:
    """Return the trained tokens, or pairs, per row. Windows of text have equally many tokens, counted as 1."""
    if not isinstance(rows, SampleRows):
        return Fraction(1)
    return Fraction(rows.fitted.retained if rows.pairs else rows.fitted.trained, len(rows))
