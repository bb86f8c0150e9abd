"""The rows of a corpus by number: windows of its text, or its samples packed."""

from collections.abc import Iterator
from typing import Protocol

from meshwright.data.corpus import Corpus, TokenStream
from meshwright.data.sample_rows import SampleRows
from meshwright.data.windows import Sampler, Sequences
from meshwright.spec import Data, Recipe
from meshwright.spec.errors import DataError
from meshwright.spec.objective_traits import CROSS_ENTROPY, PREFERENCES
from meshwright.spec.units import many


class NumberedRows(Protocol):
    """Rows of tokens, each one sample of a run."""

    def __len__(self) -> int:
        """Of one epoch."""

    def take(self, cursor: int, count: int) -> Sequences:
        """Rows [cursor, cursor + count) of the run."""

    def windows_in_order(self, count: int, *, limit: int = 0) -> Iterator[Sequences]:
        """All rows once, `count` at a time; `limit` > 0 takes so many, spread evenly."""


def check_objective(data: Data, recipe: Recipe, corpus: Corpus) -> None:
    """DataError where an objective over pairs has none, or another one has them."""
    if corpus.train.pairs and not recipe.traits.pairs:
        raise DataError(
            f"data.path={data.path} holds preferences (chosen and rejected), and recipe.objective={recipe.objective} "
            f"compares nothing: take recipe.objective={PREFERENCES[0]}, or another of {', '.join(PREFERENCES)}"
        )
    if recipe.traits.pairs and not corpus.train.pairs and len(corpus.train.starts):
        raise DataError(
            f"recipe.objective={recipe.objective} compares answers, and data.path={data.path} has no columns chosen "
            f"and rejected: take recipe.objective={CROSS_ENTROPY}, or a file with pairs"
        )


def remarks_on(rows: NumberedRows, data: Data) -> tuple[str, ...]:
    """What becomes of samples that do not fit, for the first lines of a run; none where all do."""
    if not isinstance(rows, SampleRows):
        return ()
    found, fitted, what = [], rows.fitted, "pair" if rows.pairs else "sample"
    if fitted.overlong and data.overlong == "truncate":
        found.append(
            f"{many(fitted.overlong, what)} longer than a row lost {many(fitted.cut_tokens, 'token')} and the end "
            f"of an answer: a longer recipe.sequence keeps them, data.overlong=drop leaves such {what}s out"
        )
    if fitted.left_out:
        short = f", {fitted.untrained:,} of them without a trained token in a row's length" if fitted.untrained else ""
        found.append(f"{many(fitted.left_out, what)} left out{short}; `meshwright data show` has the lengths")
    return tuple(found)


def numbered_rows(data: Data, recipe: Recipe, corpus: Corpus, stream: TokenStream, *, shuffle: bool) -> NumberedRows:
    """Of a stream of the corpus; DataError where there is less than a row, or where the objective is for other data."""
    check_objective(data, recipe, corpus)
    if stream.marks is not None:
        return SampleRows(stream, data, corpus.tokenizer, sequence=recipe.sequence, seed=recipe.seed, shuffle=shuffle)
    return Sampler(
        stream,
        sequence=recipe.sequence,
        tokenizer_separator=corpus.tokenizer.separator,
        seed=recipe.seed,
        shuffle=shuffle,
    )
