"""The tokens of a plan's data: of text, of samples, or of a mixture, encoded now or found in the cache."""

from functools import partial
from pathlib import Path

from meshwright.data import mixed_corpus, sample_cache, token_cache
from meshwright.data.cache_folder import Progress
from meshwright.data.corpus import Corpus
from meshwright.data.sources import Source
from meshwright.spec import Data
from meshwright.spec.errors import DataError


def prepare(
    data: Data, *, cache_root: Path | None = None, processes: int | None = None, progress: Progress | None = None
) -> Corpus:
    """As token_cache.prepare, or sample_cache.prepare where data.form is samples; a mixture source by source."""
    if data.mixture:
        one = partial(prepare, cache_root=cache_root, processes=processes, progress=progress)
        return mixed_corpus.prepare(data, one, cache_root)
    make = sample_cache.prepare if data.form == "samples" else token_cache.prepare
    return make(data, cache_root=cache_root, processes=processes, progress=progress)


def holds_pairs(data: Data) -> bool:
    """Whether the first row of the data is a preference. False where no row can be read: `prepare` says why."""
    try:
        _, row = next(iter(Source((data.sources or (data,))[0]).rows()), ("", {}))
    except DataError:
        return False
    return all(row.get(name) is not None for name in ("chosen", "rejected"))
