"""Raw shards: text behind URLs, or in the formats of other trainers, as documents. One piece of a file at a time.

| file | read as |
|---|---|
| .jsonl, also .gz, .zst; .json.gz, .json.zst | a document a line |
| .parquet | a document a row |
| .mds, also .gz, .zst | a document a sample of mosaicml-streaming, version 2 |
| .tar | a document a sample of WebDataset: files of one name up to its first dot |
| others | a text each |

An MDS shard is a count n, n + 1 offsets (all uint32), a JSON of its columns, and the samples: sizes of the columns that
vary, then the columns (`streaming/base/format/mds/writer.py` of mosaicml/streaming).
"""

import gzip
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import numpy as np

from meshwright.data.text import rows
from meshwright.data.text.rows import Malformed, MalformedRows, Row
from meshwright.data.text.sources import (
    MAGIC,
    NOT_READ,
    SHARDS,
    Document,
    documents_of,
    ends,
    is_binary,
    is_shard,
    list_files,
)
from meshwright.remote.locations import Location, is_url
from meshwright.remote.transfer import download
from meshwright.spec import Data
from meshwright.spec.errors import DataError, printable
from meshwright.spec.extras import require
from meshwright.spec.units import many
from meshwright.spec.user_cache import temporary_folder

_BLOCK_BYTES = 2**23


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Lines of a file that begin in [begin, end), or a whole file."""

    path: str
    """Local path or URL."""
    begin: int
    end: int
    file_bytes: int

    @property
    def name(self) -> str:
        """Name in messages."""
        return printable(self.path) + (f" from byte {self.begin}" if self.begin else "")

    @property
    def is_whole(self) -> bool:
        """It is a whole file."""
        return (self.begin, self.end) == (0, self.file_bytes)


def list_spans(path: str, most_bytes: int) -> list[Span]:
    """Return all text of a path in a fixed order. Files of lines are cut into spans of about `most_bytes`.

    Raises DataError where there is none.
    """
    files = _list_remote(path) if is_url(path) else _list_local(path)
    # The index of MDS shards repeats what the shards themselves say, but for one that is not there.
    folders = {name.rpartition("/")[0] for name, _ in files if ".mds" in name.rpartition("/")[2]}
    indexes = {f"{folder}/index.json" for folder in folders}
    names = {name for name, _ in files}
    for index in sorted(indexes & names):
        _check_index(index, names)
    files = [(name, size) for name, size in files if size and name not in indexes]
    if not files:
        raise DataError(f"data.path={printable(path)} holds no text: name a folder, a file or a pattern that has some")
    if unread := next((name for name, _ in files if name.endswith(NOT_READ)), ""):
        raise DataError(f"{printable(unread)} is packed in a way that is not read: take .gz or .zst, and .tar as it is")
    if packed := next((name for name, _ in files if name.endswith(".zst")), ""):
        require("zst", printable(packed), error=DataError)
    return [span for name, size in files for span in _cut(name, size, most_bytes)]


def _check_index(index: str, names: set[str]) -> None:
    """Raise DataError for shards that an index of MDS shards names, and that are not in its folder."""
    folder, _, _ = index.rpartition("/")
    try:
        shards = json.loads(Location.at(index).read())["shards"]
        wanted = [[shard[kind]["basename"] for kind in ("raw_data", "zip_data") if shard.get(kind)] for shard in shards]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{printable(index)} is no index of MDS shards: {error!r}; write it again, or remove it"
        ) from None
    if missing := [kinds[-1] for kinds in wanted if not any(f"{folder}/{name}" in names for name in kinds)]:
        raise DataError(
            f"{printable(folder)} lacks {many(len(missing), 'shard')} of its index.json, as {missing[0]}: copy the "
            "folder again, or remove the index"
        )


def _cut(name: str, size: int, most_bytes: int) -> Iterator[Span]:
    step = most_bytes if ends(name) == (".jsonl", "") else size
    for begin in range(0, size, step):
        yield Span(path=name, begin=begin, end=min(size, begin + step), file_bytes=size)


def _list_remote(path: str) -> list[tuple[str, int]]:
    parts = path.split("/")
    plain = next((number for number, part in enumerate(parts) if set(part) & MAGIC), len(parts))
    location = Location.open("/".join(parts[:plain]))
    if plain == len(parts) and (file := location.describe()):
        return [(location.url, file.size_bytes)]
    files = location.list_files("/".join(parts[plain:]))
    if plain == len(parts):  # of a folder, nothing hidden
        files = [file for file in files if not any(part.startswith((".", "_")) for part in file.name.split("/"))]
    return [(f"{location.url}/{file.name}", file.size_bytes) for file in files]


def _list_local(path: str) -> list[tuple[str, int]]:
    files, _ = list_files(path)
    if Path(path).expanduser().is_dir():
        # Whoever names a folder means the text in it.
        files = [file for file in files if is_shard(file.name) or not is_binary(file)]
    return [(str(file), file.stat().st_size) for file in files]


def documents(span: Span, data: Data, malformed: MalformedRows | None = None) -> Iterator[Document]:
    """Yield the non-empty documents of a span. Each must be read before the next is requested.

    Rows without text are counted in `malformed`, or raise MalformedRowError where that is None. Raises DataError,
    StoreError.
    """
    kind, packed = ends(span.path)
    if packed and kind not in (".jsonl", ".json", *SHARDS[:1]):
        raise DataError(f"{span.name}: compressed files of rows are read, .jsonl{packed} and .mds{packed}: unpack it")
    with ExitStack() as stack:
        file = stack.enter_context(_fetched(span))
        if kind == ".parquet":
            records = rows.parquet(file, [data.text_field], span.name)
        elif kind == ".json" and not packed:
            records = rows.json_array(file)
        elif kind in (".jsonl", ".json", *SHARDS):
            opened = stack.enter_context(_open(file, span, packed))
            records = _RECORDS[kind](opened, span)
        else:
            yield Document(name=span.name, pieces=rows.read(file))
            return
        try:
            yield from documents_of(records, data.text_field, malformed)
        except (EOFError, OSError, tarfile.TarError, zlib.error) as error:
            raise DataError(f"{span.name} is damaged or cut off: {error}; copy it again") from error


@contextmanager
def _fetched(span: Span) -> Iterator[Path]:
    """Give a local file with the span. What lies behind a URL is removed afterwards."""
    if not is_url(span.path):
        yield Path(span.path)
        return
    location = Location.open(span.path)
    with temporary_folder("raw") as folder:
        file = folder / location.name
        if span.is_whole:
            download([(location, file, "")])
        else:
            _fetch_lines(location, span, file)
        yield file


def _fetch_lines(location: Location, span: Span, file: Path) -> None:
    """Copy the span's lines from `location` to `file`, in blocks.

    The copy starts a byte early, so that the reader can tell whether the first line began before the span. It runs to
    the end of the last line.
    """
    with file.open("wb") as copy:
        block = b""
        for begin in range(max(0, span.begin - 1), span.end, _BLOCK_BYTES):
            block = location.read(begin, min(span.end, begin + _BLOCK_BYTES))
            copy.write(block)
        # The last line begins in the span, and may end behind it.
        position = span.end
        while not block.endswith(b"\n") and position < span.file_bytes:
            stop = min(span.file_bytes, position + _BLOCK_BYTES // 8)
            rest = location.read(position, stop)
            line, end, _ = rest.partition(b"\n")
            block, position = line + end, stop
            copy.write(block)


@contextmanager
def _open(path: Path, span: Span, packed: str) -> Iterator[IO[bytes]]:
    """Open a file of rows at the span's first line."""
    with path.open("rb") as file:
        if packed == ".gz":
            with gzip.open(file) as unpacked:
                yield unpacked  # type: ignore[misc]  # a GzipFile reads as IO[bytes] and is not declared so
        elif packed:
            import zstandard

            try:
                yield BufferedReader(_ZstdFrames(file, zstandard.ZstdDecompressor().decompressobj))
            except zstandard.ZstdError as error:
                raise DataError(f"{span.name} is damaged or cut off: {error}; copy it again") from error
        else:
            yield file


class _ZstdFrames(RawIOBase):
    """Unpacked contents of zstd frames. A frame that is cut off raises EOFError: the library's own reader just ends."""

    def __init__(self, file: IO[bytes], begin_frame: Callable[[], Any]) -> None:
        self._file, self._begin_frame = file, begin_frame
        self._frame: Any = None
        self._packed = self._unpacked = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as one piece of the file goes. Returns the bytes written, 0 at the end."""
        while not self._unpacked:
            packed = self._packed or self._file.read(_BLOCK_BYTES // 8)
            if not packed and self._frame is not None:
                raise EOFError("its last frame has no end")
            if not packed:
                return 0
            frame = self._frame or self._begin_frame()
            self._unpacked = frame.decompress(packed)
            self._frame, self._packed = (None, frame.unused_data) if frame.eof else (frame, b"")
        size = min(len(buffer), len(self._unpacked))
        buffer[:size], self._unpacked = self._unpacked[:size], self._unpacked[size:]
        return size


def _lines(file: IO[bytes], span: Span) -> Iterator[Row]:
    if span.is_whole:
        yield from rows.json_lines(file, span.name)
        return
    # A copy from behind a URL begins with the byte before the span.
    shift = max(0, span.begin - 1) if is_url(span.path) else 0
    if span.begin:
        # A line that began before belongs to the span before. If the byte before is a line end, nothing is lost.
        file.seek(span.begin - 1 - shift)
        file.readline()
    yield from rows.json_lines(file, span.name, end=span.end - shift)


def _mds(file: IO[bytes], span: Span) -> Iterator[Row]:
    (samples,) = np.frombuffer(_read(file, 4, span), "<u4").tolist()
    offsets = np.frombuffer(_read(file, 4 * (samples + 1), span), "<u4").astype(np.int64)
    try:
        columns = json.loads(_read(file, int(offsets[0]) - 4 * (samples + 2), span))
        names, encodings, sizes = (columns[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{span.name} is no MDS shard of version 2: {error}") from error
    for number, length in enumerate(np.diff(offsets).tolist(), start=1):
        sample = _read(file, length, span)
        varying = sum(size is None for size in sizes)
        lengths = iter(np.frombuffer(sample[: 4 * varying], "<u4").tolist())
        position, row, where = 4 * varying, dict[str, Any](), f"{span.name}:{number}"
        try:
            for name, encoding, size in zip(names, encodings, sizes, strict=True):
                size = next(lengths) if size is None else size
                column, position = sample[position : position + size], position + size
                row[name] = column.decode() if encoding == "str" else column
            yield where, row
        except UnicodeDecodeError:
            yield where, Malformed(f"{span.name}, row {number}: not UTF-8 text")


def _read(file: IO[bytes], size: int, span: Span) -> bytes:
    data = file.read(size) if size >= 0 else b""
    if len(data) != size:
        raise DataError(f"{span.name} is damaged or cut off: an MDS shard has more bytes; copy it again")
    return data


def _tar(file: IO[bytes], span: Span) -> Iterator[Row]:
    with tarfile.open(fileobj=file, mode="r|") as archive:
        members = (member for member in archive if member.isfile())
        samples = groupby(members, lambda member: _split_name(member.name)[0])
        for number, (_, parts) in enumerate(samples, start=1):
            row, where = dict[str, Any](), f"{span.name}:{number}"
            complaint = ""
            for member in parts:
                ending = _split_name(member.name)[1]
                content = archive.extractfile(member)
                assert content is not None, "a file has contents"
                try:
                    row |= _fields(ending, content.read())
                except ValueError as error:
                    complaint = f"{span.name}, row {number}: {member.name}: {error}"
            yield where, Malformed(complaint) if complaint else row


def _fields(ending: str, content: bytes) -> Mapping[str, Any]:
    """Return the fields of one file of a sample: those of a .json, a text as `text` and by its ending."""
    if ending == "json":
        fields = json.loads(content)
        return fields if isinstance(fields, dict) else {ending: fields}
    if ending in ("txt", "text", "md", "html"):
        return {ending: (text := content.decode()), "text": text}
    return {ending: content}


def _split_name(name: str) -> tuple[str, str]:
    folder, _, file = name.rpartition("/")
    key, _, ending = file.partition(".")
    return f"{folder}/{key}", ending.lower()


_RECORDS = {".jsonl": _lines, ".json": _lines, ".mds": _mds, ".tar": _tar}
