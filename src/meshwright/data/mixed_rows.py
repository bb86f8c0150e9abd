"""The rows of a mixture: every row is one of its sources' own, in the order that the weights give."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import cached_property
from typing import Any, Final, final

import numpy as np

from meshwright.data.interleaving import Interleaving
from meshwright.data.sample_rows import SampleRows
from meshwright.data.windows import NumberedRows, Sequences


@final
class MixedRows:
    """The training order of a mixture: row c of a run is row j of source s, both from `Interleaving.place(c)`. A source
    goes through epochs of its own, each in another order. One epoch of the mixture is as many rows as all have."""

    def __init__(self, rows: Sequence[NumberedRows], weights: Sequence[float]) -> None:
        """`weights` are shares of what a loss is the mean of, trained tokens or pairs: a source whose rows hold fewer
        of them gets more rows."""
        self.rows: Final = tuple(rows)
        self.weights: Final = tuple(weights)

    @cached_property
    def interleaving(self) -> Interleaving:
        """Which source each row is of; every source has a row."""
        rows = zip(self.rows, self.weights, strict=True)
        return Interleaving([Fraction(repr(weight)) / _counted_in_a_row(one) for one, weight in rows])

    def __len__(self) -> int:
        """Rows of all sources together."""
        return sum(map(len, self.rows))

    def take(self, cursor: int, count: int) -> Sequences:
        """Rows [cursor, cursor + count) of the run; of each source they are a run of its own rows."""
        sources, numbers = self.interleaving.place(np.arange(cursor, cursor + count, dtype=np.int64))
        found = []
        order = np.argsort(sources, kind="stable")
        for source in np.unique(sources).tolist():
            here = numbers[sources == source]
            found.append(self.rows[source].take(int(here[0]), len(here)))
        together, places = joined(found), np.empty_like(order)
        places[order] = np.arange(count)
        return together.rows(places)

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """The rows of the first source, then of the next, `count` at a time (fewer at the end); `limit` > 0 takes so
        many, of each source by its share, at least one."""
        waiting: list[Sequences] = []
        for one, most in zip(self.rows, limits(self.weights, limit), strict=True):
            for found in one.windows_in_order(count, limit=most):
                waiting.append(found)
                if sum(len(part.tokens) for part in waiting) >= count:
                    whole = joined(waiting)
                    yield whole.rows(slice(0, count))
                    waiting = [whole.rows(slice(count, None))] if len(whole.tokens) > count else []
        if waiting:
            yield joined(waiting)


def limits(weights: Sequence[float], limit: int) -> list[int]:
    """How many of `limit` rows each source has in an evaluation: by its weight, at least one; 0 = all of them."""
    return [max(1, round(limit * weight / sum(weights))) if limit else 0 for weight in weights]


def joined(found: Sequence[Sequences]) -> Sequences:
    """Batches one below the other; `packed` where one is."""
    if len(found) == 1:
        return found[0]
    parts = {field.name: [getattr(one, field.name) for one in found] for field in fields(Sequences)}
    packed = any(parts.pop("packed"))
    arrays: dict[str, Any] = {name: None if each[0] is None else np.concatenate(each) for name, each in parts.items()}
    return Sequences(packed=packed, **arrays)


def _counted_in_a_row(rows: NumberedRows) -> Fraction:
    """Tokens that are trained, or pairs, a row; windows of text have equally many tokens, counted as 1."""
    if not isinstance(rows, SampleRows):
        return Fraction(1)
    return Fraction(rows.fitted.kept if rows.pairs else rows.fitted.trained, len(rows))
