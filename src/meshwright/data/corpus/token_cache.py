"""Cache of tokens: texts are encoded once and stored by content. Later runs map the tokens and start at once."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, final

import numpy as np

from meshwright.data.corpus.corpus import (
    Corpus,
    Progress,
    TokenFile,
    TokenStream,
    lock,
    map_numbers,
    new_folder,
    read_json,
    sync,
    write_json,
)
from meshwright.data.corpus.pool import Batch, Pool, group_by_size
from meshwright.data.text import sources
from meshwright.data.text.rows import MalformedRows
from meshwright.data.text.sources import Source
from meshwright.data.tokens.tokenizer import Tokenizer, choose, trained_vocab
from meshwright.spec import Data
from meshwright.spec.errors import DataError

FORMAT: Final = 1
"""Version of the cache, raised whenever the same text would be stored differently."""

STREAMS: Final = ("train", "validation")
BATCH_CHARACTERS: Final = 2**18
_ALONE_BYTES: Final = 2**20
"""Largest text that is encoded in this process, which takes less time than starting others."""
TRAINING_CHARACTERS: Final = 2**25
"""Text for training a tokenizer. More no longer changes the merges, and a trainer holds every distinct word."""


def prepare(data: Data, source: Source, root: Path, processes: int | None, progress: Progress | None) -> Corpus:
    """Return the tokens of text, encoded now or read from the cache in `root`. Raises DataError, OSError."""
    index = root / "index" / f"{source.signature()}.json"
    # The digest of unchanged files is in the index, so a second run need not read the text.
    counted, known = None, read_json(index)
    stale = data.malformed == "skip" and "malformed" not in known  # of an older version
    if not known.get("content") or stale:
        counted, known = _count(data, source, index)
    digest, malformed = known["content"], MalformedRows(**known.get("malformed", {}))
    tokenizer = _choose_tokenizer(data, source, digest, root)
    # All that decides the tokens, and nothing else: runs that differ in the rest share a folder.
    content = repr((FORMAT, digest, tokenizer.fingerprint, tokenizer.vocab, data.validation, *source.skips))
    fingerprint = hashlib.blake2b(content.encode(), digest_size=20).hexdigest()
    folder = root / "tokens" / fingerprint[:24]
    if (corpus := load(folder, tokenizer, fingerprint, open_stream)) is not None:
        return replace(corpus, malformed=malformed)  # files with the same texts share a folder, and differ in this
    with lock(folder):  # another process may have written it meanwhile
        if (corpus := load(folder, tokenizer, fingerprint, open_stream)) is not None:
            return replace(corpus, malformed=malformed)
        if counted is None:
            # The index was current and the folder is gone: the survey is needed for the split.
            counted, now = _count(data, source, index)
            # Tokens of another text must not be stored under this digest.
            if now["content"] != digest:
                raise DataError(_describe_change(data))
        build = _Build(data, source, tokenizer, counted, processes, progress)
        build.into(folder, fingerprint)
    if (corpus := load(folder, tokenizer, fingerprint, open_stream)) is None:
        raise DataError(f"token cache: {folder} was damaged while it was made: run again")
    return corpus


def _count(data: Data, source: Source, index: Path) -> tuple[sources.Survey, dict[str, Any]]:
    """Read all documents once, and store digest and malformed rows for as long as the files look unchanged."""
    malformed = MalformedRows()
    counted = sources.survey(source.documents(malformed))
    # Skipping every row would train on nothing without a word.
    if malformed.malformed and (data.malformed == "refuse" or not counted.num_bytes):
        raise malformed.refusal("texts")
    if not counted.num_bytes:
        raise DataError(f"data.path={data.path} holds no text: every document is empty")
    index.parent.mkdir(parents=True, exist_ok=True)
    known = {"content": counted.digest, "malformed": asdict(malformed) if malformed.malformed else {}}
    write_json(index, known)
    return counted, known


def _describe_change(data: Data) -> str:
    return f"data.path={data.path} changed while it was read: run again when nothing writes there"


def _choose_tokenizer(data: Data, source: Source, digest: str, root: Path) -> Tokenizer:
    """Return the requested tokenizer. A trained one is stored by the content it was trained on."""
    if not data.tokenizer.startswith("bpe:"):
        return choose(data.tokenizer, source.folder, iter(()))
    texts = read_beginning(source.documents(), TRAINING_CHARACTERS)
    return Tokenizer.load(train_tokenizer(data.tokenizer, digest, root, texts))


def train_tokenizer(setting: str, digest: str, root: Path, texts: Iterator[str]) -> Path:
    """Return the folder of a tokenizer that is trained on texts with this digest, now or earlier."""
    folder = root / "tokenizers" / f"{digest}-{trained_vocab(setting)}"
    # Missing or damaged: it is trained again.
    with contextlib.suppress(DataError):
        Tokenizer.load(folder)
        return folder
    tokenizer = choose(setting, None, texts)
    with new_folder(folder) as new:
        tokenizer.save(new)
    return folder


def read_beginning(documents: Iterable[sources.Document], characters: int) -> Iterator[str]:
    """Yield pieces from the first documents, about this many characters."""
    for document in documents:
        for piece in document.pieces:
            yield piece
            characters -= len(piece)
            if characters <= 0:
                return


@final
@dataclass(frozen=True, slots=True)
class _Build:
    """One encoding of all text into a new cache folder."""

    data: Data
    source: Source
    tokenizer: Tokenizer
    counted: sources.Survey
    processes: int | None
    progress: Progress | None

    def into(self, folder: Path, fingerprint: str) -> None:
        """Create the complete folder, or leave nothing."""
        with new_folder(folder) as new, contextlib.ExitStack() as open_files:
            streams = [open_files.enter_context(_Writer(new / name, self.tokenizer)) for name in STREAMS]
            malformed = self._encode(streams)
            meta = {name: stream.counts() for name, stream in zip(STREAMS, streams, strict=True)}
            open_files.close()
            # Sizes are compared at every start, which finds a truncated file without reading it.
            files = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
            origin = {"source": self.source.title, "tokenizer": self.tokenizer.fingerprint}
            content = {"fingerprint": fingerprint, "files": files, "streams": meta, **origin}
            write_json(new / "meta.json", content | malformed_entry(malformed))

    def _encode(self, streams: list["_Writer"]) -> MalformedRows:
        """Write the streams and return the rows that were left out."""
        reading, done, total = sources.Reading(), 0, self.counted.num_bytes
        chosen = sources.choose(self.counted, self.data.validation)
        waiting: list[list[sources.SplitPart]] = []
        malformed = MalformedRows()
        parts = sources.parts(self.source.documents(malformed), chosen, reading)
        # Starting a process takes as long as encoding this much.
        processes = 1 if total <= _ALONE_BYTES else self.processes
        with Pool(self.tokenizer, processes) as pool:
            for ids in pool.map(
                queue_batches(group_by_size(parts, lambda part: len(part.text), BATCH_CHARACTERS), waiting)
            ):
                for part, tokens in zip(waiting.pop(0), ids, strict=True):
                    streams[part.stream].write(part, tokens)
                    done += len(part.text.encode())
                if self.progress is not None:
                    self.progress(done, total)
        if reading.survey().digest != self.counted.digest:
            raise DataError(_describe_change(self.data))
        return malformed


def queue_batches(
    batches: Iterator[list[sources.SplitPart]], waiting: list[list[sources.SplitPart]]
) -> Iterator[Batch]:
    """Yield the batches for the pool. Their parts wait for the ids."""
    for batch in batches:
        waiting.append(batch)
        yield bytes(not part.first for part in batch), [part.text for part in batch]


class PieceWriter:
    """Writer of the ids of pieces, with the marks of their documents, that counts what it writes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._width = tokenizer.dtype.itemsize
        self._before, self._after = (np.array(ids, tokenizer.dtype).tobytes() for ids in tokenizer.document_marks)
        self._size = self._text = 0

    def _write_piece(self, file: IO[bytes], part: sources.SplitPart, ids: bytes) -> None:
        written = (self._before if part.first else b"") + ids + (self._after if part.last else b"")
        file.write(written)
        self._size += len(written)
        self._text += len(part.text.encode())


@final
class _Writer(PieceWriter):
    """Writer of one stream: ids to NAME.tokens, document starts to NAME.starts."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._path, self._documents = path, 0

    def __enter__(self) -> "_Writer":
        self._tokens = self._path.with_suffix(".tokens").open("wb", buffering=2**20)
        self._starts = self._path.with_suffix(".starts").open("wb", buffering=2**16)
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._tokens, self._starts):
            try:
                if error[0] is None:
                    sync(file)
            finally:
                file.close()

    def write(self, part: sources.SplitPart, ids: bytes) -> None:
        """Append the ids of one piece, with the marks of its document."""
        if part.first:
            self._starts.write(np.int64(self._size // self._width).tobytes())
            self._documents += 1
        self._write_piece(self._tokens, part, ids)

    def counts(self) -> dict[str, int]:
        """Return the counts for meta.json."""
        tokens = self._size // self._width
        return {"num_tokens": tokens, "num_bytes": self._text, "num_documents": self._documents}


def malformed_entry(malformed: MalformedRows) -> dict[str, Any]:
    """Return the entry of meta.json for rows that were left out. Empty = there are none."""
    return {"malformed": asdict(malformed)} if malformed.malformed else {}


def load(
    folder: Path,
    tokenizer: Tokenizer,
    fingerprint: str,
    stream: Callable[[Path, dict[str, int], Tokenizer], TokenStream],
) -> Corpus | None:
    """Return the corpus in a folder. None = it is missing or differs from its meta.json.

    `stream` opens the files of a stream, given their name and counts.
    """
    meta = read_json(folder / "meta.json")
    try:
        whole = meta["fingerprint"] == fingerprint and all(
            (folder / name).stat().st_size == size for name, size in meta["files"].items()
        )
        if not whole:
            return None
        train, validation = (stream(folder / name, meta["streams"][name], tokenizer) for name in STREAMS)
        malformed = MalformedRows(**meta.get("malformed", {}))
    except (KeyError, TypeError, ValueError, AttributeError, FileNotFoundError):
        return None
    return Corpus(
        train=train, validation=validation, tokenizer=tokenizer, fingerprint=fingerprint, key=folder.name,
        malformed=malformed,
    )  # fmt: skip


def open_stream(path: Path, counts: dict[str, int], tokenizer: Tokenizer) -> TokenStream:
    """Return the stream in PATH.tokens and PATH.starts."""
    file = path.with_suffix(".tokens")
    tokens = map_numbers(file, tokenizer.dtype, counts["num_tokens"])
    starts = map_numbers(path.with_suffix(".starts"), np.dtype(np.int64), counts["num_documents"])
    return TokenStream(
        tokens=tokens,
        starts=starts,
        num_tokens=counts["num_tokens"],
        num_bytes=counts["num_bytes"],
        num_documents=counts["num_documents"],
        file=TokenFile(file, tokenizer.dtype) if hasattr(os, "pread") else None,
    )
