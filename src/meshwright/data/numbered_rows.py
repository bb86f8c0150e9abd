"""The rows of a corpus by number: windows of its text, its samples packed, or those of several sources."""

from collections.abc import Iterator

from meshwright.data.corpus import Corpus, MixedStream, Stream
from meshwright.data.mixed_rows import MixedRows
from meshwright.data.sample_rows import SampleRows
from meshwright.data.windows import NumberedRows as NumberedRows
from meshwright.data.windows import Sampler
from meshwright.spec import Data, Recipe
from meshwright.spec.errors import DataError
from meshwright.spec.objective_traits import CROSS_ENTROPY, PREFERENCES


def check_objective(data: Data, recipe: Recipe, pairs: bool | None) -> None:
    """DataError where an objective over pairs has none, or another one has them. `pairs`: whether rows are; None =
    there are no rows."""
    if data.mixture and (recipe.traits.pairs or pairs):
        raise DataError(
            "data.mixture has no rows of preferences (chosen and rejected): put them into one file, as data.path"
        )
    if pairs and not recipe.traits.pairs:
        raise DataError(
            f"data.path={data.path} holds preferences (chosen and rejected), and recipe.objective={recipe.objective} "
            f"compares nothing: take recipe.objective={PREFERENCES[0]}, or another of {', '.join(PREFERENCES)}"
        )
    if recipe.traits.pairs and pairs is False:
        raise DataError(
            f"recipe.objective={recipe.objective} compares answers, and data.path={data.path} has no columns chosen "
            f"and rejected: take recipe.objective={CROSS_ENTROPY}, or a file with pairs"
        )


def numbered_rows(data: Data, recipe: Recipe, corpus: Corpus, stream: Stream, *, shuffle: bool) -> NumberedRows:
    """Of a stream of the corpus; DataError where there is less than a row of any source, or where the objective is for
    other data."""
    parts = corpus.train.parts
    pairs = any(part.pairs for part in parts) if any(len(part.starts) for part in parts) else None
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
    """Of the sources of a mixture; DataError names the one."""
    for one, part in zip(data.sources, stream.parts, strict=True):
        try:
            yield numbered_rows(one, recipe, corpus, part, shuffle=shuffle)
        except DataError as error:
            named = f"data.path={one.path}"
            raise DataError(str(error) if named in str(error) else f"{named}: {error}") from error
