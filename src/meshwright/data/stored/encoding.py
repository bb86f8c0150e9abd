"""Encoding of text into a token store, by one of several workers.

Text is divided into units by the sizes of its files alone, so all workers know the same units without talking. A worker
takes every N-th. A unit counts once its record exists, which is written behind its shards: a killed worker repeats one
unit. Documents are held out by a hash of their beginning, so that no worker must know the others' text.
"""

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from meshwright.data.corpus.corpus import Progress
from meshwright.data.corpus.pool import Pool, group_by_size
from meshwright.data.corpus.token_cache import (
    BATCH_CHARACTERS,
    TRAINING_CHARACTERS,
    PieceWriter,
    queue_batches,
    read_beginning,
)
from meshwright.data.stored.index import ALIGNED, FORMAT, SIDES, index_bytes, read_document, read_index
from meshwright.data.text.raw_shards import Span, documents, list_spans
from meshwright.data.text.rows import MalformedRows, sum_malformed
from meshwright.data.text.sources import HELD_OUT, TRAIN, Document, SplitPart, is_store, list_files, mark_ends
from meshwright.data.tokens.tokenizer import Tokenizer, choose
from meshwright.remote.locations import Location, is_url
from meshwright.remote.transfer import download, hash_file, upload
from meshwright.spec import Data
from meshwright.spec.errors import DataError, printable
from meshwright.spec.plan.plan import SAMPLES, STDLIB
from meshwright.spec.user_cache import temporary_folder

SHARD_TOKENS: Final = 2**24
"""Tokens of a shard, about: 32 or 64 MiB."""
_BYTES_PER_TOKEN: Final = 8
"""Text of a unit per token of a shard. English has 4 to 5, so that a unit fills about two shards."""
_MOST_DOCUMENTS: Final = 2**20
"""Most documents of a shard, whose starts are in memory."""
_READERS: Final = 32
"""Records of units that are read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """State of a store after a worker's part."""

    store: str
    units: int
    """Units of all workers."""
    encoded: int
    """Units that this call encoded."""
    missing: int
    """Units that other parts still have to encode. 0 = the store is finished."""
    part: tuple[int, int]
    train_tokens: int = 0
    """Tokens to train on, once the store is finished."""
    held_out_tokens: int = 0
    train_shards: int = 0
    documents: int = 0
    malformed_rows: int = 0


def prepare_store(
    data: Data,
    store: str,
    *,
    part: tuple[int, int] = (1, 1),
    processes: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress | None = None,
) -> Prepared:
    """Encode part (I, N) of the text of `data` into a store, a folder or URL, unless it is there already.

    Args:
        data: One source with its tokenizer.
        store: Where to write, empty or begun with the same text and settings.
        part: This worker's number from 1, and the number of workers. Each call may have another number of workers.
        processes: Encoding processes, by default one per core.
        shard_tokens: Tokens of a shard, at least 1.
        progress: Called with bytes of text done and in all, of this part.

    Raises DataError, StoreError.
    """
    _check(data, store)
    location = Location.at(store)
    spans = list_spans(data.path, _BYTES_PER_TOKEN * shard_tokens)
    # A unit is many small files, or a part of a large one.
    units = list(group_by_size(spans, lambda span: span.end - span.begin, _BYTES_PER_TOKEN * shard_tokens // 2))
    definition, tokenizer = _agree(location, data, spans, len(units), shard_tokens)
    sizes = location.list_sizes()
    numbers = range(part[0] - 1, len(units), part[1])
    missing = [number for number in numbers if _record(location, number, sizes) is None]
    weights = {number: sum(span.end - span.begin for span in units[number]) for number in numbers}
    whole, left = sum(weights.values()), sum(weights[number] for number in missing)
    with Pool(tokenizer, processes) as pool:
        for number in missing:
            _UnitEncoder(location, data, tokenizer, shard_tokens, pool).encode(number, units[number])
            left -= weights[number]
            if progress is not None:
                progress(whole - left, whole)
    absent = _merge(location, definition, len(units), bool(missing))
    prepared = Prepared(store=store, units=len(units), encoded=len(missing), missing=absent, part=part)
    if absent:
        return prepared
    index = read_index(location)
    return replace(
        prepared,
        train_tokens=int(index.train.tokens.sum()), held_out_tokens=int(index.held.tokens.sum()),
        train_shards=len(index.train.file), malformed_rows=int(index.malformed.get("malformed", 0)),
        documents=int(index.train.documents.sum() + index.held.documents.sum()),
    )  # fmt: skip


def _check(data: Data, store: str) -> None:
    if data.mixture:
        raise DataError("a token store has one source: prepare each, and mix them with data=STORE_A:0.7,STORE_B:0.3")
    if data.path == STDLIB or data.path.startswith("hub:"):
        raise DataError(f"data.path={data.path} is not made of files: train on it as it is, or name files")
    if data.form == SAMPLES or data.limit_bytes:
        named = "form=samples" if data.form == SAMPLES else f"limit_bytes={data.limit_bytes}"
        raise DataError(f"data.{named}: a token store holds whole texts; leave it out")
    if is_store(data.path):
        path = printable(data.path)
        raise DataError(f"data.path={path} is a token store, so it is prepared already: train with data={path}")
    folder = Path(store).expanduser()
    if is_url(store) or not folder.exists() or (folder / "store.json").is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise DataError(f"{store} exists and is no token store: name an empty or new folder")


def _agree(
    location: Location, data: Data, spans: list[Span], units: int, shard_tokens: int
) -> tuple[dict[str, Any], Tokenizer]:
    """Return the definition of the store and its tokenizer, written now or by another worker.

    Raises DataError when the store was begun with other text, or in another way.
    """
    folder = os.path.commonpath([span.path.rpartition("/")[0] for span in spans])
    # A file is known by its first span, however it is cut.
    listed = repr([(span.path.removeprefix(folder), span.file_bytes) for span in spans if not span.begin])
    begun = read_document(location / "store.json")
    tokenizer = _choose_tokenizer(location, data, spans, begun)
    definition = {
        "format": FORMAT, "source": data.path, "text": hashlib.blake2b(listed.encode(), digest_size=16).hexdigest(),
        "text_field": data.text_field, "malformed": data.malformed, "validation": data.validation,
        "tokenizer": tokenizer.fingerprint, "vocab": tokenizer.vocab, "shard_tokens": shard_tokens, "units": units,
    }  # fmt: skip
    if begun is not None:
        # One machine may see the files under another name than the next.
        definition["source"] = begun.get("source")
        for key, setting in definition.items():
            if begun.get(key) != setting:
                named = "files of other names or sizes" if key == "text" else f"{key}={begun.get(key)}, not {setting}"
                has_units = any(name.startswith("units/") for name in location.list_sizes())
                remedy = "name a new store" if has_units else "remove it, for nothing is encoded yet"
                raise DataError(f"{location} was begun with {named}: repeat its words, or {remedy}")
        return definition, tokenizer
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as local:
        tokenizer.save(local)
        for file in sorted(path for path in Path(local).rglob("*") if path.is_file()):
            (location / "tokenizer" / file.relative_to(local).as_posix()).write(file.read_bytes())
    (location / "store.json").write(json.dumps(definition, indent=1).encode())
    return definition, tokenizer


def _choose_tokenizer(location: Location, data: Data, spans: list[Span], begun: dict[str, Any] | None) -> Tokenizer:
    """Return the plan's tokenizer, or that of a store that was begun.

    A tokenizer that nobody named is refused, since terabytes would be encoded twice.
    """
    folder = None if is_url(data.path) else list_files(data.path)[1]
    is_beside = folder is not None and (folder / "tokenizer.json").is_file()
    if begun is not None and (data.tokenizer == "auto" or data.tokenizer.startswith("bpe:")):
        return load_tokenizer(location)
    if data.tokenizer == "auto" and not is_beside:
        raise DataError(
            "no tokenizer is named, and none lies beside the text: give the model's with data.tokenizer=DIR, or "
            "data.tokenizer=bpe:32768 to train one on the beginning of the text"
        )
    texts = (document for span in spans for document in documents(span, data, MalformedRows()))
    return choose(data.tokenizer, folder, read_beginning(texts, TRAINING_CHARACTERS))


def load_tokenizer(location: Location) -> Tokenizer:
    """Return the tokenizer of a store."""
    folder = location / "tokenizer"
    if folder.local is not None:
        return Tokenizer.load(folder.local)
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as local:
        download([(folder / name, Path(local) / name, "") for name in folder.list_sizes() if ".." not in name])
        return Tokenizer.load(local)


def _unit_name(number: int) -> str:
    return f"units/{number:06d}.json"


def _record(location: Location, number: int, sizes: dict[str, int]) -> dict[str, Any] | None:
    """Return the record of a unit whose shards are there. None = it must be encoded."""
    if _unit_name(number) not in sizes:
        return None
    record = read_document(location / _unit_name(number))
    shards = [shard for side in SIDES for shard in (record or {}).get(side, ())]
    return record if all(sizes.get(shard["file"]) == shard["bytes"] for shard in shards) else None


def _merge(location: Location, definition: dict[str, Any], units: int, is_changed: bool) -> int:
    """Write the index if all units are there. Returns how many are not."""
    sizes = location.list_sizes()
    if absent := sum(_unit_name(number) not in sizes for number in range(units)):
        return absent
    if not is_changed and "index.json" in sizes:
        return 0
    with ThreadPoolExecutor(_READERS) as pool:
        records = list(pool.map(lambda number: _record(location, number, sizes), range(units)))
    if absent := records.count(None):
        return absent
    whole = [record for record in records if record is not None]
    malformed = sum_malformed(MalformedRows(**record["malformed"]) for record in whole)
    if not any(record["train"] for record in whole):
        raise DataError(f"data.path={definition['source']} holds no text: every document is empty or held out")
    (location / "index.json").write(index_bytes(definition, whole, asdict(malformed)))
    return 0


@final
@dataclass(frozen=True, slots=True)
class _UnitEncoder:
    """Encoding of units with one pool."""

    location: Location
    data: Data
    tokenizer: Tokenizer
    shard_tokens: int
    pool: Pool

    def encode(self, number: int, unit: list[Span]) -> None:
        """Write the shards of a unit, then its record."""
        malformed, waiting = MalformedRows(), list[list[SplitPart]]()
        with self._folder(number) as folder, ExitStack() as stack:
            writers = [_ShardWriter(folder, number, side, self.tokenizer, self.shard_tokens) for side in SIDES]
            for writer in writers:
                stack.callback(writer.close)
            texts = (document for span in unit for document in documents(span, self.data, malformed))
            batches = group_by_size(_split(texts, self.data.validation), lambda part: len(part.text), BATCH_CHARACTERS)
            for ids in self.pool.map(queue_batches(batches, waiting)):
                for part, tokens in zip(waiting.pop(0), ids, strict=True):
                    writers[part.stream].write(part, tokens)
            if malformed.malformed and self.data.malformed == "refuse":
                raise malformed.refusal("texts")
            shards = {writer.side: writer.close() for writer in writers}
            self._store([folder / Path(shard["file"]).name for side in SIDES for shard in shards[side]])
        record = {"unit": number, **shards, "malformed": asdict(malformed)}
        (self.location / _unit_name(number)).write(json.dumps(record).encode())

    @contextmanager
    def _folder(self, number: int) -> Iterator[Path]:
        """Give a temporary folder, in a local store itself, so that shards are renamed and not copied."""
        if self.location.local is None:
            with temporary_folder("unit") as folder:
                yield folder
            return
        for leftover in self.location.local.glob(f".unit-{number}.*"):  # of a worker that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        unit = f".unit-{number}."
        with tempfile.TemporaryDirectory(prefix=unit, dir=self.location.local, ignore_cleanup_errors=True) as local:
            yield Path(local)

    def _store(self, files: list[Path]) -> None:
        target = self.location / "shards"
        if target.local is None:
            upload([(file, target / file.name, "") for file in files])
            return
        target.local.mkdir(exist_ok=True)
        for file in files:
            with file.open("rb") as written:
                os.fsync(written.fileno())
            file.replace(target.local / file.name)


def _split(texts: Iterable[Document], share: float) -> Iterator[SplitPart]:
    """Yield the pieces of documents with their side. Equal documents are on one side, whoever reads them."""

    def sided(document: Document) -> Iterator[tuple[int, str]]:
        side = TRAIN
        for number, piece in enumerate(filter(None, document.pieces)):
            if number == 0:
                digest = hashlib.blake2b(piece.encode(), digest_size=8).digest()
                side = HELD_OUT if int.from_bytes(digest, "little") < share * 2**64 else TRAIN
            yield side, piece

    for document in texts:
        yield from mark_ends(sided(document))


@final
class _ShardWriter(PieceWriter):
    """Writer of the shards of one unit and side."""

    def __init__(self, folder: Path, unit: int, side: str, tokenizer: Tokenizer, shard_tokens: int) -> None:
        super().__init__(tokenizer)
        self.side = side
        self._folder, self._unit, self._shard_tokens = folder, unit, shard_tokens
        self._records: list[dict[str, Any]] = []
        self._file: Any = None
        self._starts = array("q")

    def write(self, part: SplitPart, ids: bytes) -> None:
        """Append a piece. A shard ends behind a document, but for one that is as long as two shards."""
        tokens = self._size // self._width
        is_full = tokens >= self._shard_tokens or len(self._starts) >= _MOST_DOCUMENTS
        if (part.first and is_full) or tokens >= 2 * self._shard_tokens:
            self._finish()
        if self._file is None:
            self._file = (self._folder / f"{self._unit:06d}-{len(self._records)}.{self.side}").open("wb", 2**20)
        if part.first:
            self._starts.append(self._size // self._width)
        self._write_piece(self._file, part, ids)

    def close(self) -> list[dict[str, Any]]:
        """End the last shard, and return the records of all."""
        if self._file is not None:
            self._finish()
        return self._records

    def _finish(self) -> None:
        self._file.write(bytes(-self._size % ALIGNED) + self._starts.tobytes())
        self._file.close()
        path = Path(self._file.name)
        counts = {"tokens": self._size // self._width, "documents": len(self._starts), "text_bytes": self._text}
        record = {"file": f"shards/{path.name}", "sha256": hash_file(path), "bytes": path.stat().st_size}
        self._records.append(record | counts)
        self._file, self._starts, self._size, self._text = None, array("q"), 0, 0
