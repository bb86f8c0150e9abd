"""Tokens of a plan's data: of text, of samples, or of a mixture, encoded now or read from the cache."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Literal

from meshwright.data.chat.rendering import named_template
from meshwright.data.chat.samples import Preference, Sample, is_sample, sample
from meshwright.data.corpus import sample_cache, token_cache
from meshwright.data.corpus.corpus import Corpus, MixedStream, Progress, Stream, TokenStream
from meshwright.data.corpus.token_cache import TRAINING_CHARACTERS, read_beginning, train_tokenizer
from meshwright.data.sequences.numbered_rows import check_alike
from meshwright.data.text.rows import Malformed, MalformedRows, require_hub, sum_malformed
from meshwright.data.text.sources import Source, is_stored
from meshwright.data.tokens.tokenizer import Tokenizer, tokenizer_file
from meshwright.spec import Data
from meshwright.spec.errors import DataError, MalformedRowError, argument
from meshwright.spec.plan.plan import SAMPLES, STDLIB, TEXT
from meshwright.spec.user_cache import writable_root

_LOOKED_AT = 256
"""Rows at the beginning of a source that are checked before anything slow."""


def prepare(
    data: Data, *, cache_root: Path | None = None, processes: int | None = None, progress: Progress | None = None
) -> Corpus:
    """Return the tokens of text, or of samples, encoded now or read from the cache. A mixture is made source by source.

    `processes` is by default one per core. Memory stays below 1 GiB in all. `progress` is called only while text is
    encoded. Concurrent callers do the work once, and a damaged cache is rebuilt. Token stores, and raw shards, are
    opened by data/stored. Raises DataError for text that cannot be encoded, with file and line for bad rows.
    """
    if not data.mixture and is_stored(data.path):
        from meshwright.data.stored.corpus import open_corpus

        return open_corpus(data, cache_root=cache_root, processes=processes, progress=progress)
    if data.mixture:
        prepare_source = partial(prepare, cache_root=cache_root, processes=processes, progress=progress)
        return _prepare_mixture(data, prepare_source, cache_root)
    make = sample_cache.prepare if data.form == SAMPLES else token_cache.prepare
    source, root = Source(data), cache_root or writable_root()
    try:
        return make(data, source, root, processes, progress)
    except OSError as error:
        where = error.filename or root
        raise DataError(f"token cache: {where}: {error.strerror}; set XDG_CACHE_HOME to a folder with room") from error


def _prepare_mixture(data: Data, prepare_source: Callable[[Data], Corpus], cache_root: Path | None) -> Corpus:
    """Prepare all sources with one tokenizer. Raises DataError naming the source, or all malformed rows."""
    with_tokenizer = replace(data, tokenizer=_choose_tokenizer(data, cache_root or writable_root()))
    corpora, refusals = list[Corpus](), list[str]()
    for source in with_tokenizer.sources:
        try:
            corpora.append(prepare_source(source))
        except MalformedRowError as error:
            refusals.append(str(error))
    if refusals:
        raise MalformedRowError("; ".join(refusals))
    if len({corpus.tokenizer.fingerprint for corpus in corpora}) > 1:  # token stores bring their own
        raise DataError(f"data={data.title}: stores have different tokenizers: prepare all with one data.tokenizer")
    weights = tuple(source.weight for source in data.mixture)
    fingerprint = corpora[0].fingerprint
    if len(corpora) > 1:
        together = repr([corpus.fingerprint for corpus in corpora])
        fingerprint = hashlib.blake2b(together.encode(), digest_size=20).hexdigest()
    return Corpus(
        train=MixedStream(parts=_number_documents(corpus.train for corpus in corpora), weights=weights),
        validation=MixedStream(parts=_number_documents(corpus.validation for corpus in corpora), weights=weights),
        tokenizer=corpora[0].tokenizer, fingerprint=fingerprint, key=fingerprint[:24],
        unread=sum((Counter(corpus.unread) for corpus in corpora), Counter()),
        malformed=sum_malformed(corpus.malformed for corpus in corpora),
    )  # fmt: skip


def _number_documents(streams: Iterable[Stream]) -> tuple[TokenStream, ...]:
    """Return each source's stream with the number of documents before it."""
    parts = [part for stream in streams for part in stream.parts]
    before = accumulate((part.num_documents for part in parts), initial=0)
    return tuple(replace(part, first=first) for part, first in zip(parts, before, strict=False))


def _choose_tokenizer(data: Data, root: Path) -> str:
    """Return the tokenizer of all sources as a value of data.tokenizer that no folder changes."""
    stored = [part.path for part in data.sources if is_stored(part.path)]
    sources = [Source(part) for part in data.sources if part.path not in stored]
    if data.tokenizer == "auto" and stored:
        if sources:
            raise DataError(
                f"a mixture has one tokenizer: name that of {stored[0]} with data.tokenizer, or prepare every source"
            )
        return "auto"  # each store brings its own
    if data.tokenizer == "auto":
        beside = [source.folder / "tokenizer.json" for source in sources if source.folder is not None]
        files = {file.resolve(): file for file in beside if file.is_file()}
        by_fingerprint = {Tokenizer.load(file.parent).fingerprint: file for file in files.values()}
        if len(by_fingerprint) > 1:
            names = " and ".join(str(file) for file in islice(by_fingerprint.values(), 2))
            raise DataError(f"a mixture has one tokenizer, and its sources have {names}: name one with data.tokenizer")
        return str(next(iter(by_fingerprint.values()), "auto"))
    if not data.tokenizer.startswith("bpe:"):
        return data.tokenizer
    if stored:
        raise DataError(f"data.tokenizer={data.tokenizer} is trained on local text: for {stored[0]}, name a tokenizer")
    return str(_train_tokenizer(data, sources, root) / "tokenizer.json")


def _train_tokenizer(data: Data, sources: list[Source], root: Path) -> Path:
    """Return the folder of a tokenizer trained on equal parts of every source, whatever their weights."""
    signatures = repr([source.signature() for source in sources])
    digest = hashlib.blake2b(signatures.encode(), digest_size=20).hexdigest()
    share = TRAINING_CHARACTERS // len(sources)
    texts = (piece for source in sources for piece in read_beginning(source.documents(), share))
    return train_tokenizer(data.tokenizer, digest, root, texts)


def check_sources(data: Data) -> None:
    """Raise DataError, before anything slow, for a missing path, tokenizer or template, or a path without text.

    This reads the first rows, or the first document, of each source. If a row is malformed and data.malformed=refuse,
    all rows are read, so that all are named. Hub datasets are not loaded.
    """
    if data.tokenizer not in ("auto", "bytes") and not data.tokenizer.startswith("bpe:"):
        tokenizer_file(data.tokenizer)
    if data.form == SAMPLES:
        named_template(data.template)
    for source in data.sources or (data,):
        if is_stored(source.path):
            from meshwright.data.stored.corpus import check_stored

            check_stored(source)
        elif source.path.startswith("hub:"):
            require_hub(source.path)
        elif source.path != STDLIB and _must_refuse(source):
            prepare(data)  # reads all rows, and raises with the names of all malformed ones


def _must_refuse(data: Data) -> bool:
    """Return whether a row at the beginning of a source must be refused."""
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
    """Raise DataError, before anything slow, for a text to score that is missing or empty."""
    data = Data(path=str(path))
    check_sources(replace(data, form=form_of(data)))


def holds_pairs(data: Data) -> bool:
    """Return whether the first rows are preferences. Raises DataError for malformed ones, and if sources differ."""
    firsts = [_first_sample(source) for source in data.sources or (data,)]
    check_alike(data, [None if first is None else isinstance(first, Preference) for first in firsts])
    return any(isinstance(first, Preference) for first in firsts)


def form_of(data: Data) -> Literal["text", "samples"]:
    """Return the form of the data by the columns of its first readable row.

    It is samples if the row is a sample without a text. A null is not a text: tables pad rows with nulls.
    """
    if is_stored(data.path):
        return TEXT
    try:
        for row in islice(Source(data).rows(), _LOOKED_AT):
            if not isinstance(row[1], Malformed) and row[1].get(data.text_field) is not None:
                return TEXT
            if is_sample(row):
                return SAMPLES
    except DataError:  # reported by whoever reads it
        pass
    return TEXT


def _first_sample(data: Data) -> Sample | None:
    if data.path == STDLIB:
        raise DataError(
            f"tune needs conversations: give {argument('data', 'FILE')}, a .jsonl, .json or .parquet file or "
            "a hub dataset"
        )
    named_template(data.template)
    rows = list(islice(Source(data).rows(), 1))
    if rows and not is_sample(rows[0]):  # malformed rows are named together, by whoever reads them all
        rows = [row for row in islice(Source(data).rows(), _LOOKED_AT) if is_sample(row)] or rows
    return sample(rows[0]) if rows else None
