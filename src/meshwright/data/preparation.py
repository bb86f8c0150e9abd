"""The tokens of a plan's data: of text, of samples, or of a mixture, encoded now or found in the cache."""

from functools import partial
from pathlib import Path
from typing import Literal

from meshwright.data import mixed_corpus, sample_cache, token_cache
from meshwright.data.cache_folder import Progress
from meshwright.data.corpus import Corpus
from meshwright.data.named_templates import named_template
from meshwright.data.numbered_rows import check_alike
from meshwright.data.samples import Preference, Sample, sample
from meshwright.data.sources import Source
from meshwright.data.tokenizer import tokenizer_file
from meshwright.spec import Data
from meshwright.spec.errors import DataError
from meshwright.spec.plan import SAMPLES, STDLIB, TEXT


def prepare(
    data: Data, *, cache_root: Path | None = None, processes: int | None = None, progress: Progress | None = None
) -> Corpus:
    """As token_cache.prepare, or sample_cache.prepare where data.form is samples; a mixture source by source."""
    if data.mixture:
        one = partial(prepare, cache_root=cache_root, processes=processes, progress=progress)
        return mixed_corpus.prepare(data, one, cache_root)
    make = sample_cache.prepare if data.form == SAMPLES else token_cache.prepare
    return make(data, cache_root=cache_root, processes=processes, progress=progress)


def check_sources(data: Data) -> None:
    """Refuse, before anything slow, a path that does not exist or holds no text, a tokenizer or template that is not
    there: DataError. Reads the first document or row of each source; hub datasets wait for their turn."""
    if data.tokenizer not in ("auto", "bytes") and not data.tokenizer.startswith("bpe:"):
        tokenizer_file(data.tokenizer)
    if data.form == SAMPLES:
        named_template(data.template)
    for each in data.sources or (data,):
        if each.path == STDLIB or each.path.startswith("hub:"):
            continue
        source = Source(each)
        if data.form == SAMPLES:
            next(source.rows(), None)
        elif document := next(source.documents(), None):
            next(document.pieces, None)


def holds_pairs(data: Data) -> bool:
    """Whether the data's rows are preferences, after the first of each source. DataError for what is wrong with those
    rows, with a file or with a template, and where sources differ: seen in a moment, before anything else is begun."""
    found = [_first_sample(one) for one in data.sources or (data,)]
    check_alike(data, [None if one is None else isinstance(one, Preference) for one in found])
    return any(isinstance(one, Preference) for one in found)


def form_of(data: Data) -> Literal["text", "samples"]:
    """As the columns of the first row say: samples, where they are those of one and no text is among them."""
    try:
        row = next(iter(Source(data).rows()), None)
        if row is None or data.text_field in row[1]:
            return TEXT
        sample(row)
    except DataError:  # what is wrong is said by whoever reads it
        return TEXT
    return SAMPLES


def _first_sample(data: Data) -> Sample | None:
    if data.path == STDLIB:
        raise DataError(
            "there is nothing to tune on: give data=FILE, a .jsonl, .json or .parquet file or a hub dataset of "
            "conversations"
        )
    named_template(data.template)
    row = next(iter(Source(data).rows()), None)
    return None if row is None else sample(row)
