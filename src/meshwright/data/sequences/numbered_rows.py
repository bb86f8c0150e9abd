"""Numbered rows of a corpus: windows of its text, its samples packed, or those of several sources."""

from collections.abc import Iterator, Sequence

from meshwright.data.corpus.corpus import Corpus, MixedStream, Stream
from meshwright.data.sequences.mixed_rows import MixedRows
from meshwright.data.sequences.sample_rows import SampleRows
from meshwright.data.sequences.windows import NumberedRows as NumberedRows
from meshwright.data.sequences.windows import Sampler
from meshwright.spec import Data, Recipe
from meshwright.spec.errors import DataError
from meshwright.spec.recipe.recipe import CROSS_ENTROPY, PREFERENCES


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
    each = [part.pairs if len(part.starts) else None for part in corpus.train.parts]
    check_alike(data, each)
    pairs = None if set(each) <= {None} else any(each)
    check_objective(data, recipe, pairs)
    if isinstance(stream, MixedStream):
        return MixedRows(list(_of_each(data, recipe, corpus, stream, shuffle)), stream.weights)
    if stream.marks is not None:
        return SampleRows(stream, data, corpus.tokenizer, sequence=recipe.sequence, seed=recipe.seed, shuffle=shuffle)
    return Sampler(
        stream,
        sequence=recipe.sequence,
        tokenizer_separator=corpus.tokenizer.separator,
        seed=recipe.seed,
        shuffle=shuffle,
    )


def _of_each(data: Data, recipe: Recipe, corpus: Corpus, stream: MixedStream, shuffle: bool) -> Iterator[NumberedRows]:
    """Yield the rows of each source of a mixture. Raises DataError naming the source."""
    for source, part in zip(data.sources, stream.parts, strict=True):
        try:
            yield numbered_rows(source, recipe, corpus, part, shuffle=shuffle)
        except DataError as error:
            named = f"data.path={source.path}"
            raise DataError(str(error) if named in str(error) else f"{named}: {error}") from error
