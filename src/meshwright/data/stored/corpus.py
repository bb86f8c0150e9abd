"""Corpus of a token store: checked, opened, and its held-out part gathered on local disk.

Text behind a URL, and raw shards of other trainers, are encoded into a store in the user's cache first. How many tokens
a raw shard gives is known only when it is encoded, and without that no row has a number (docs/decisions, 71).
"""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshwright.data.corpus.corpus import Corpus, Progress, TokenStream, lock, new_folder, read_json, write_json
from meshwright.data.corpus.token_cache import open_stream
from meshwright.data.stored.encoding import load_tokenizer, prepare_store
from meshwright.data.stored.index import StoreIndex, check_files, read_index
from meshwright.data.stored.shard_cache import ShardCache, StoredStream
from meshwright.data.text.raw_shards import list_spans
from meshwright.data.text.rows import MalformedRows
from meshwright.data.text.sources import is_store
from meshwright.data.tokens.tokenizer import Tokenizer, choose
from meshwright.remote.locations import Location
from meshwright.spec import Data
from meshwright.spec.errors import DataError
from meshwright.spec.plan.plan import SAMPLES
from meshwright.spec.units import short_gib
from meshwright.spec.user_cache import writable_root

_SHOWN_TOKENS = 2**20
"""Tokens of the first shard that reports look at."""
_DEFAULT_SHARE = Data().validation


def open_corpus(
    data: Data, *, cache_root: Path | None = None, processes: int | None = None, progress: Progress | None = None
) -> Corpus:
    """Return the corpus of a token store, or of raw shards, which are encoded now unless they were before.

    Raises DataError for what cannot be trained on, StoreError.
    """
    root, is_prepared = cache_root or writable_root(), is_store(data.path)
    _check_settings(data, is_prepared)
    if is_prepared:
        return _open_store(data, Location.at(data.path), root)
    listed = repr([(span.path, span.file_bytes) for span in list_spans(data.path, 2**62)])
    settings = (listed, data.text_field, data.tokenizer, data.validation, data.malformed)
    key = hashlib.blake2b(repr(settings).encode(), digest_size=12).hexdigest()
    folder = root / "stores" / f"raw-{key}"
    with lock(folder):
        prepare_store(data, str(folder), processes=processes, progress=progress)
    # What held the text out and encoded it was this very plan.
    return _open_store(replace(data, tokenizer="auto", validation=_DEFAULT_SHARE), Location.at(str(folder)), root)


def check_stored(data: Data) -> None:
    """Raise DataError, before anything slow, for a store or raw shards that cannot be trained on."""
    is_prepared = is_store(data.path)
    if is_prepared:
        location = Location.at(data.path)
        _check_room(data, location, read_index(location), writable_root())
    else:
        list_spans(data.path, 2**62)
    _check_settings(data, is_prepared)


def _check_settings(data: Data, is_prepared: bool) -> None:
    if data.form == SAMPLES or data.limit_bytes:
        named = "form=samples" if data.form == SAMPLES else f"limit_bytes={data.limit_bytes}"
        raise DataError(f"data.{named} is not read from data.path={data.path}: leave it out, or name local files")
    if data.tokenizer == "auto" and not is_prepared:
        # Terabytes may lie there: the text is not encoded twice for a tokenizer that nobody chose.
        raise DataError(
            f"data.path={data.path} is encoded before the first step, with a tokenizer that you name: "
            "data.tokenizer=DIR, or data.tokenizer=bytes"
        )


def _open_store(data: Data, location: Location, root: Path) -> Corpus:
    index = read_index(location)
    folder = root / "stores" / index.fingerprint[:24]
    tokenizer = _tokenizer(data, location, index)
    if data.validation not in (index.validation, _DEFAULT_SHARE):
        raise DataError(
            f"data.validation={data.validation:g}: {location} holds out {index.validation:g}, as it was prepared; "
            "leave the key out, or prepare another store"
        )
    _check_room(data, location, index, root)
    cache = ShardCache(location, index.train, index.vocab, folder, data.cache_bytes)
    first = cache.open(0) if len(index.train.file) else None
    if first is None:
        raise DataError(f"{location} holds no text to train on")
    # A copy: a mapping would hold the shard on disk after it was removed.
    shown = np.array(first.tokens[:_SHOWN_TOKENS])
    train = StoredStream(
        tokens=shown, starts=first.starts[first.starts < len(shown)], num_tokens=int(index.train.tokens.sum()),
        num_bytes=int(index.train.text_bytes.sum()), num_documents=int(index.train.documents.sum()), cache=cache,
        shuffled_shards=index.shuffled_shards,
    )  # fmt: skip
    return Corpus(
        train=train, validation=_gather_held_out(location, index, tokenizer, folder), tokenizer=tokenizer,
        fingerprint=index.fingerprint, key=index.fingerprint[:24], malformed=MalformedRows(**index.malformed),
    )  # fmt: skip


def _tokenizer(data: Data, location: Location, index: StoreIndex) -> Tokenizer:
    """Return the tokenizer of a store. Raises DataError when the plan names another one."""
    tokenizer = load_tokenizer(location)
    if tokenizer.fingerprint != index.tokenizer:
        raise DataError(f"{location}/tokenizer is not the one of its index: prepare the store again, elsewhere")
    if data.tokenizer != "auto":
        asked = None if data.tokenizer.startswith("bpe:") else choose(data.tokenizer, None, iter(()))
        if asked is None or asked.fingerprint != index.tokenizer:
            raise DataError(
                f"data.tokenizer={data.tokenizer} is not the tokenizer that encoded {location}: leave the key out to "
                "take the store's own, or prepare another store"
            )
    return tokenizer


def _check_room(data: Data, location: Location, index: StoreIndex, root: Path) -> None:
    """Raise DataError if a shard is missing, or the cache too small for two blocks, or local disk for the cache.

    While one block is read, the next is fetched.
    """
    check_files(location, index)
    held = int(index.held.bytes.sum())
    if location.local is None:
        sizes = np.sort(index.train.bytes)[::-1]
        least, whole = int(sizes[: 2 * index.shuffled_shards].sum()), int(sizes.sum())
        if data.cache_bytes < least:
            raise DataError(
                f"data.cache_bytes={data.cache_bytes} is too little: two blocks of {location} have {least:,} bytes; "
                f"take data.cache_bytes={least} or more"
            )
        held += min(data.cache_bytes, whole)
    folder = root / "stores" / index.fingerprint[:24]
    present = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if held - present > free:
        remedy = "set XDG_CACHE_HOME to a folder with room"
        if location.local is None:
            remedy = f"take a lower data.cache_bytes, at least {least}, or {remedy}"
        raise DataError(f"{root} has {short_gib(free)} free, and shards of {location} need {short_gib(held)}: {remedy}")


def _gather_held_out(location: Location, index: StoreIndex, tokenizer: Tokenizer, folder: Path) -> TokenStream:
    """Return the held-out shards as one stream, copied into local files once."""
    target, shards = folder / "held-out", index.held
    with lock(target):
        sizes = read_json(target / "meta.json").get("files", {})
        present = {path.name: path.stat().st_size for path in target.glob("held.*")}
        if not sizes or sizes != present:
            _copy_held_out(location, index, folder, target)
    columns = {"num_tokens": shards.tokens, "num_documents": shards.documents, "num_bytes": shards.text_bytes}
    return open_stream(target / "held", {name: int(column.sum()) for name, column in columns.items()}, tokenizer)


def _copy_held_out(location: Location, index: StoreIndex, folder: Path, target: Path) -> None:
    # Room for one shard at a time: what is copied is removed with the next.
    cache = ShardCache(location, index.held, index.vocab, folder / "held", 1)
    with new_folder(target) as new:
        files = [new / "held.tokens", new / "held.starts"]
        with files[0].open("wb") as tokens, files[1].open("wb") as starts:
            before = 0
            for number in range(len(index.held.file)):
                shard = cache.open(number)
                tokens.write(shard.read(0, shard.num_tokens).tobytes())
                starts.write((shard.starts + before).tobytes())
                before += shard.num_tokens
        write_json(new / "meta.json", {"files": {file.name: file.stat().st_size for file in files}})
    shutil.rmtree(folder / "held", ignore_errors=True)
