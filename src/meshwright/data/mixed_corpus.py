"""The corpus of a mixture: each source is encoded and cached by itself, so that other weights encode nothing anew."""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path

from meshwright.data.cache_folder import new_folder
from meshwright.data.corpus import Corpus, MixedStream, Stream, TokenStream
from meshwright.data.rows import all_malformed
from meshwright.data.sources import Source
from meshwright.data.tokenizer import Tokenizer, choose, trained_vocab
from meshwright.spec import Data
from meshwright.spec.errors import DataError, MalformedRowError
from meshwright.spec.user_cache import writable_root

_TRAIN_BPE_CHARACTERS = 2**25


def prepare(data: Data, make: Callable[[Data], Corpus], cache_root: Path | None = None) -> Corpus:
    """All sources, read with one tokenizer; `make` prepares one of them. DataError names the source; malformed rows
    of all sources are named together."""
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
    """Each source's stream, which knows how many documents come before its own."""
    parts = [part for stream in streams for part in stream.parts]
    before = accumulate((part.num_documents for part in parts), initial=0)
    return tuple(replace(part, first=first) for part, first in zip(parts, before, strict=False))


def _tokenizer(data: Data, root: Path) -> str:
    """The one that all sources are read with, as a value of data.tokenizer that no folder changes."""
    sources = [Source(one) for one in data.sources]
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
    """The folder of a tokenizer that is trained on equal parts of every source, whatever their weights."""
    signatures = repr([source.signature() for source in sources])
    digest = hashlib.blake2b(signatures.encode(), digest_size=20).hexdigest()
    folder = root / "tokenizers" / f"{digest}-{trained_vocab(data.tokenizer)}"
    with contextlib.suppress(DataError):
        Tokenizer.load(folder)
        return folder
    made = choose(data.tokenizer, None, _samples(sources))
    with new_folder(folder) as new:
        made.save(new)
    return folder


def _samples(sources: list[Source]) -> Iterator[str]:
    """The beginning of each source, 32 MiB in all."""
    for source in sources:
        left = _TRAIN_BPE_CHARACTERS // len(sources)
        for document in source.documents():
            for piece in document.pieces:
                yield piece
                left -= len(piece)
                if left <= 0:
                    break
            if left <= 0:
                break
