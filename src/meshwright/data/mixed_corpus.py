"""Corpus of a mixture: each source is encoded and cached by itself, so other weights encode nothing anew."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path

from meshwright.data.corpus import Corpus, MixedStream, Stream, TokenStream
from meshwright.data.rows import all_malformed
from meshwright.data.sources import Source
from meshwright.data.token_cache import TRAINING_CHARACTERS, beginning, trained_folder
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec import Data
from meshwright.spec.errors import DataError, MalformedRowError
from meshwright.spec.user_cache import writable_root


def prepare(data: Data, make: Callable[[Data], Corpus], cache_root: Path | None = None) -> Corpus:
    """Prepare all sources with one tokenizer. Raises DataError naming the source, or all malformed rows."""
    with_tokenizer = replace(data, tokenizer=_tokenizer(data, cache_root or writable_root()))
    corpora, refusals = list[Corpus](), list[str]()
    for source in with_tokenizer.sources:
        try:
            corpora.append(make(source))
        except MalformedRowError as error:
            refusals.append(str(error))
    if refusals:
        raise MalformedRowError("; ".join(refusals))
    weights = tuple(source.weight for source in data.mixture)
    fingerprint = corpora[0].fingerprint
    if len(corpora) > 1:
        together = repr([corpus.fingerprint for corpus in corpora])
        fingerprint = hashlib.blake2b(together.encode(), digest_size=20).hexdigest()
    return Corpus(
        train=MixedStream(parts=_numbered(corpus.train for corpus in corpora), weights=weights),
        validation=MixedStream(parts=_numbered(corpus.validation for corpus in corpora), weights=weights),
        tokenizer=corpora[0].tokenizer,
        fingerprint=fingerprint,
        key=fingerprint[:24],
        unread=sum((Counter(corpus.unread) for corpus in corpora), Counter()),
        malformed=all_malformed(corpus.malformed for corpus in corpora),
    )


def _numbered(streams: Iterable[Stream]) -> tuple[TokenStream, ...]:
    """Return each source's stream with the number of documents before it."""
    parts = [part for stream in streams for part in stream.parts]
    before = accumulate((part.num_documents for part in parts), initial=0)
    return tuple(replace(part, first=first) for part, first in zip(parts, before, strict=False))


def _tokenizer(data: Data, root: Path) -> str:
    """Return the tokenizer of all sources as a value of data.tokenizer that no folder changes."""
    sources = [Source(part) for part in data.sources]
    if data.tokenizer == "auto":
        beside = [source.folder / "tokenizer.json" for source in sources if source.folder is not None]
        files = {file.resolve(): file for file in beside if file.is_file()}
        known = {Tokenizer.load(file.parent).fingerprint: file for file in files.values()}
        if len(known) > 1:
            names = " and ".join(str(file) for file in islice(known.values(), 2))
            raise DataError(f"a mixture has one tokenizer, and its sources have {names}: name one with data.tokenizer")
        return str(next(iter(known.values()), "auto"))
    if not data.tokenizer.startswith("bpe:"):
        return data.tokenizer
    return str(_trained(data, sources, root) / "tokenizer.json")


def _trained(data: Data, sources: list[Source], root: Path) -> Path:
    """Return the folder of a tokenizer trained on equal parts of every source, whatever their weights."""
    signatures = repr([source.signature() for source in sources])
    digest = hashlib.blake2b(signatures.encode(), digest_size=20).hexdigest()
    texts = (piece for source in sources for piece in beginning(source, TRAINING_CHARACTERS // len(sources)))
    return trained_folder(data.tokenizer, digest, root, texts)
