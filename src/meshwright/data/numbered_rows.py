"""The rows of a corpus by number: windows of its text, or its samples packed."""

from collections.abc import Iterator
from typing import Protocol

from meshwright.data.corpus import Corpus, TokenStream
from meshwright.data.sample_rows import SampleRows
from meshwright.data.windows import Sampler, Sequences
from meshwright.spec import Data, Recipe


class NumberedRows(Protocol):
    """Rows of tokens, each one sample of a run."""

    def __len__(self) -> int:
        """Of one epoch."""

    def take(self, cursor: int, count: int) -> Sequences:
        """Rows [cursor, cursor + count) of the run."""

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """All rows once, `count` at a time; `limit` > 0 takes so many, spread evenly."""


def numbered_rows(data: Data, recipe: Recipe, corpus: Corpus, stream: TokenStream, *, shuffle: bool) -> NumberedRows:
    """Of a stream of the corpus; DataError where there is less than a row."""
    if stream.marks is not None:
        return SampleRows(stream, data, corpus.tokenizer, sequence=recipe.sequence, seed=recipe.seed, shuffle=shuffle)
    return Sampler(
        stream,
        sequence=recipe.sequence,
        tokenizer_separator=corpus.tokenizer.separator,
        seed=recipe.seed,
        shuffle=shuffle,
    )
