"""The tokens of a plan's data: of text, of samples, or of a mixture, encoded now or found in the cache."""

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from meshwright.data import mixed_corpus, sample_cache, token_cache
from meshwright.data.cache_folder import Progress
from meshwright.data.corpus import Corpus
from meshwright.data.named_templates import named_template
from meshwright.data.numbered_rows import check_alike
from meshwright.data.rows import Malformed, MalformedRows, require_hub
from meshwright.data.samples import Preference, Sample, is_sample, sample
from meshwright.data.sources import Source
from meshwright.data.tokenizer import tokenizer_file
from meshwright.spec import Data
from meshwright.spec.errors import DataError
from meshwright.spec.plan import SAMPLES, STDLIB, TEXT

_LOOKED_AT = 256
"""Rows at the beginning of a source that are looked at before anything slow."""


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
    there: DataError. Looks at the first rows, or the first document, of each source. Where a row is malformed and
    data.malformed=refuse, all are read, so that all are named. Hub datasets wait for their turn."""
    if data.tokenizer not in ("auto", "bytes") and not data.tokenizer.startswith("bpe:"):
        tokenizer_file(data.tokenizer)
    if data.form == SAMPLES:
        named_template(data.template)
    for each in data.sources or (data,):
        if each.path.startswith("hub:"):
            require_hub(each.path)
        if each.path == STDLIB or each.path.startswith("hub:"):
            continue
        if _begins_malformed(each):
            prepare(data)


def _begins_malformed(data: Data) -> bool:
    """Whether a row at the beginning of a source must be refused."""
    source, malformed = Source(data), MalformedRows()
    if data.form == SAMPLES:
        all_are_samples = all(map(is_sample, islice(source.rows(), _LOOKED_AT)))
        return data.malformed == "refuse" and not all_are_samples
    for number, document in enumerate(source.documents(malformed)):
        next(document.pieces, None)
        if malformed.malformed or number >= _LOOKED_AT or not malformed.rows:  # plain text has no rows
            break
    return data.malformed == "refuse" and malformed.malformed > 0


def check_text(path: str | Path) -> None:
    """Refuse, before anything slow, a text to score that is not there or holds none: DataError."""
    data = Data(path=str(path))
    check_sources(replace(data, form=form_of(data)))


def holds_pairs(data: Data) -> bool:
    """Whether the data's rows are preferences, after the first of each source. DataError for what is wrong with those
    rows, with a file or with a template, and where sources differ: seen in a moment, before anything else is begun."""
    found = [_first_sample(one) for one in data.sources or (data,)]
    check_alike(data, [None if one is None else isinstance(one, Preference) for one in found])
    return any(isinstance(one, Preference) for one in found)


def form_of(data: Data) -> Literal["text", "samples"]:
    """As the columns of the first row that can be read say: samples, where they are those of one and no text is among
    them. A null is no text: tables pad rows with them."""
    try:
        for row in islice(Source(data).rows(), _LOOKED_AT):
            if not isinstance(row[1], Malformed) and row[1].get(data.text_field) is not None:
                return TEXT
            if is_sample(row):
                return SAMPLES
    except DataError:  # what is wrong is said by whoever reads it
        pass
    return TEXT


def _first_sample(data: Data) -> Sample | None:
    if data.path == STDLIB:
        raise DataError("tune needs conversations: give data=FILE, a .jsonl, .json or .parquet file or a hub dataset")
    named_template(data.template)
    rows = list(islice(Source(data).rows(), 1))
    if rows and not is_sample(rows[0]):  # malformed rows are named together, by whoever reads them all
        rows = [row for row in islice(Source(data).rows(), _LOOKED_AT) if is_sample(row)] or rows
    return sample(rows[0]) if rows else None
