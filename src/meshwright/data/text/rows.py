"""Rows: records with fields in .jsonl, .json and .parquet files and in hub datasets, streamed with their location.

A JSON array is read one object at a time, since a file may be larger than memory.

Text of any length is a stream of pieces that can be encoded one by one. A piece ends where the pre-tokenizers in use
(GPT-2, Llama-3, Qwen, ours) end a word anyway, so encoding the pieces gives the same tokens as encoding the whole.

Text in another encoding than UTF-8 is refused, with the command that converts it. Byte order marks: The Unicode
Standard, section 23.8. Windows PowerShell writes UTF-16 for `>`.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any, Final, NoReturn, final

from meshwright.spec.errors import DataError, MalformedRowError
from meshwright.spec.extras import require
from meshwright.spec.units import many

_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip
"""UTF-32 first: its mark begins with that of UTF-16."""
BEGINNING: Final = 4096
"""Bytes of a file from which its encoding is detected."""
_WINDOWS: Final = frozenset(range(0x80, 0xA0))
"""Bytes of letters and quotes in Windows-1252, which are control characters in Latin-1."""


def wide_encoding(start: bytes) -> str:
    """Return UTF-16 or UTF-32 by the byte order mark of a file, or by text that appears when it is decoded.

    Empty = neither. Names are those of iconv.
    """
    marked = next((name for mark, name in _MARKS if start.startswith(mark)), "")
    if marked or b"\0" not in start[:BEGINNING]:
        return marked
    return next((name for name in ("UTF-16LE", "UTF-16BE") if _is_text(start[:BEGINNING], name)), "")


def narrow_encoding(text: bytes) -> str:
    """Guess the single-byte encoding of bytes that are not UTF-8."""
    return "Windows-1252" if _WINDOWS & set(text) else "ISO-8859-1"


def conversion_advice(encoding: str) -> str:
    """Return advice to convert a file to UTF-8, with the iconv command, for an error message."""
    return f"convert it (iconv -f {encoding} -t UTF-8)"


def check_begins_as_utf8(path: Path, start: bytes) -> None:
    """Raise DataError for a file in UTF-16 or UTF-32, of which no line could be read."""
    if encoding := wide_encoding(start):
        raise DataError(f"{path} seems to be {encoding}, not UTF-8 text: {conversion_advice(encoding)}")


def describe_non_utf8(text: bytes) -> str:
    """Describe a row that is not UTF-8. A stray byte among UTF-8 letters does not reveal an encoding."""
    letters = text.decode(errors="ignore")
    if not letters.isascii():
        return "not UTF-8 text"
    encoding = narrow_encoding(text)
    return f"not UTF-8 text; it seems to be {encoding}: {conversion_advice(encoding)}"


def _is_text(start: bytes, encoding: str) -> bool:
    """Return whether bytes decode to printable text, more than half ASCII, unlike those of programs."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(start)
    except UnicodeDecodeError:
        return False
    is_printable = all(letter.isprintable() or letter.isspace() for letter in text)
    return is_printable and sum(map(str.isascii, text)) > len(text) / 2


PIECE = 2**16
"""Longest piece in characters. The library's bookkeeping takes about 100 bytes of memory per byte of a piece."""

_BLOCK_BYTES = 2**18
_NEAR_LIMIT = 2**12
_GUESS_BYTES = 2**12
"""Bytes behind the first that is not UTF-8, from which the encoding is guessed."""

_SAFE = (
    re.compile(r"[^\W_](?=\r?\n)"),
    re.compile(r"[^\W_](?= \S)"),
    re.compile(r"\S\n(?=\S)"),
)
"""Positions at which every known word pattern ends a word: behind a letter or digit before a line end or a single
space, and between a line end and text that follows at once."""


def border(text: str, limit: int) -> int:
    """Return the position to cut `text` at or before `limit` (0 < limit < len(text)), preferably a line end."""
    # Near the limit first: searching a whole piece for the last match is slow, and seldom needed.
    for start in (max(0, limit - _NEAR_LIMIT), 0):
        for pattern in _SAFE:
            ends = [match.end() for match in pattern.finditer(text, start, limit + 1)]
            if ends:
                return ends[-1]
    return text.rfind("\n", 0, limit) + 1 or limit


def cut(text: str, size: int = PIECE) -> Iterator[str]:
    """Yield the text as pieces of at most `size` characters. "" has none."""
    start = 0
    while len(text) - start > size:
        end = start + border(text[start : start + size + 1], size)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:] if start else text


def read(path: Path) -> Iterator[str]:
    """Yield the pieces of a UTF-8 file, little of it in memory. Raises DataError for binary or other encodings."""
    decode = codecs.getincrementaldecoder("utf-8-sig")()
    buffer, offset = "", 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                buffer += _decode(decode, block, path, offset)
                offset += len(block)
                # The last piece may go on in the next block.
                *whole, buffer = cut(buffer) if len(buffer) > PIECE else (buffer,)
                yield from whole
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    buffer += _decode(decode, b"", path, offset)
    yield from cut(buffer)


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, offset: int) -> str:
    """Decode the next block, which begins `offset` bytes into the file. b"" ends the file."""
    if not offset:
        check_begins_as_utf8(path, block)
    # A text file has no NUL, although UTF-8 allows it and the decoder accepts it.
    nul = block.find(0)
    if nul >= 0:
        raise DataError(f"{path} is binary, not text: NUL byte at {offset + nul}; leave it out of data.path")
    # Bytes of a character that began in the block before: positions count from its start.
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        position = offset - pending + error.start
        encoding = narrow_encoding(error.object[error.start : error.start + _GUESS_BYTES])
        raise DataError(
            f"{path} is not UTF-8 text: byte {position} is 0x{error.object[error.start]:02x}; it seems to be "
            f"{encoding}: {conversion_advice(encoding)} or leave it out of data.path"
        ) from error


_BLOCK: Final = 2**20
_NEAR: Final = 16
"""Characters before the end of a buffer in which a word, a number or an escape may have been cut."""
MOST_CHARACTERS: Final = 2**28
"""Most characters of one row."""
_SPACES: Final = " \t\n\r"
_KINDS: Final[dict[str, str]] = {"{": "dict", "[": "list", '"': "str", "t": "bool", "f": "bool", "n": "null"}
_KINDS.update(dict.fromkeys("-0123456789", "a number"))
"""First character of a value -> its kind."""
_UNDECODED: Final = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as decoded by `surrogateescape`."""


def objects(path: Path) -> Iterator[tuple[int, Any, str]]:
    """Yield (number from 1, object, complaint or empty) for every element, streamed.

    Elements that are not objects or not UTF-8 get a complaint. Raises DataError with file, line and column for broken
    JSON, and for a row of more than MOST_CHARACTERS.
    """
    try:
        with path.open("rb") as file:
            # Another encoding is named by its byte order mark, before JSON complains about it.
            check_begins_as_utf8(path, file.read(BEGINNING))
            file.seek(0)
            yield from _ArrayReader(path, iter(lambda: file.read(_BLOCK), b"")).objects()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


@final
class _ArrayReader:
    """Text of which only the current part is in memory."""

    def __init__(self, path: Path, blocks: Iterator[bytes]) -> None:
        self._path, self._blocks = path, blocks
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._undecoded = False
        self._buffer, self._position, self._ended = "", 0, False
        self._parse_line, self._column = 1, 1  # of the beginning of the buffer

    def objects(self) -> Iterator[tuple[int, Any, str]]:
        if self._mark() != "[":
            raise DataError(
                f"{self._path} holds {self._kind()}, not an array of objects: give one object a line in a .jsonl file"
            )
        self._position += 1
        number = 0
        if self._mark() != "]":
            while True:
                number += 1
                yield number, *self._element(number)
                if self._mark() != ",":
                    break
                self._position += 1
        if self._mark() != "]":
            self._broken("Expecting ',' delimiter", self._position)
        self._position += 1
        if self._mark():
            self._broken("Extra data", self._position)

    def _element(self, number: int) -> tuple[Any, str]:
        kind = self._kind()
        complaint = "" if kind == "dict" else f"a row is an object with fields, not {kind}"
        while True:
            try:
                element, end = _DECODER.raw_decode(self._buffer, self._position)
                if complaint and end > len(self._buffer) - _NEAR and not self._ended:  # more digits may follow
                    self._read(_BLOCK)
                    continue
                row, self._position = self._buffer[self._position : end] if self._undecoded else "", end
                undecoded = _UNDECODED.search(row)
                return element, describe_non_utf8(row.encode(errors="surrogateescape")) if undecoded else complaint
            except json.JSONDecodeError as error:
                if self._ended or not self._may_go_on(error):
                    self._broken(error.msg, error.pos)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{self._path}, row {number}: broken JSON, {error}") from None
            self._read(len(self._buffer) - self._position)
            if len(self._buffer) - self._position > MOST_CHARACTERS:
                raise DataError(f"{self._path}, row {number} has more than {MOST_CHARACTERS:,} characters")

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Return whether the text is not wrong but cut by the end of the buffer."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - _NEAR

    def _mark(self) -> str:
        """Return the next character that is not a space. Empty = the end."""
        while True:
            while self._position < len(self._buffer):
                if self._buffer[self._position] not in _SPACES:
                    return self._buffer[self._position]
                self._position += 1
            if self._ended:
                return ""
            self._read(_BLOCK)

    def _read(self, characters: int) -> None:
        """Read at least `characters` more, if there are, and drop what was consumed."""
        self._parse_line, self._column = self._at(self._position)
        parts, size = [self._buffer[self._position :]], 0
        self._position = 0
        while size < max(characters, _BLOCK) and not self._ended:
            block = next(self._blocks, b"")
            self._ended = not block
            parts.append(self._decode.decode(block, final=self._ended))
            self._undecoded = self._undecoded or not _is_utf8(parts[-1])
            size += len(parts[-1])
        self._buffer = "".join(parts)

    def _at(self, position: int) -> tuple[int, int]:
        """Return (line, column) of a position in the buffer."""
        lines = self._buffer.count("\n", 0, position)
        column = position - self._buffer.rfind("\n", 0, position) if lines else self._column + position
        return self._parse_line + lines, column

    def _broken(self, why: str, position: int) -> NoReturn:
        line, column = self._at(position)
        if self._undecoded and _UNDECODED.match(self._buffer, position):
            why = "not UTF-8 text"
        raise DataError(f"{self._path}, line {line}, column {column}: broken JSON, {why}")

    def _kind(self) -> str:
        """Return the kind of the next value."""
        kind = _KINDS.get(self._mark())
        return kind if kind else self._broken("Expecting value", self._position)


def _is_utf8(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


_DECODER: Final = json.JSONDecoder()


_BUFFER_BYTES = 2**20
"""Bytes of a column read at a time. Arrow would otherwise read whole row groups."""
_BATCH_ROWS = 64
"""Rows decoded at a time, since a row may hold a whole book."""

_OF_SAMPLES = frozenset({"messages", "conversations", "completion", "output", "chosen", "input_ids"})
"""Columns of rows for fine-tuning (data/chat/samples.py)."""

_NAMED = 20
"""Most malformed rows that are named. The others are counted."""
_NUMBER = re.compile(r", (line|row) (\d+)(?=[,: ])")
"""Place of a row in a complaint."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stand-in for the fields of an unreadable row, so that the following rows can be read."""

    complaint: str
    """Message with file and line."""


Row = tuple[str, Mapping[str, Any] | Malformed]
"""(`FILE:LINE`, fields)."""


@dataclass(slots=True, kw_only=True)
class MalformedRows:
    """Number of malformed rows among all rows read, and the complaints about the first of them."""

    rows: int = 0
    """All rows read."""
    malformed: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, complaint: str) -> None:
        """Count a row, and store the complaint if it is among the first."""
        self.malformed += 1
        if len(self.first) < _NAMED:
            self.first.append(complaint)

    @property
    def named(self) -> str:
        """Complaints about the first rows, equal ones together, and the number of others, on one line."""
        more = self.malformed - len(self.first)
        alike: dict[str, list[str]] = {}
        for complaint in self.first:
            alike.setdefault(_NUMBER.sub("", complaint, count=1), []).append(complaint)
        return "; ".join(map(_merge, alike.values())) + (f"; and {more:,} more" if more else "")

    def refusal(self, kind: str) -> MalformedRowError:
        """Return an error for rows that are not `kind` (samples, texts)."""
        if self.malformed == 1:
            return MalformedRowError(self.named)
        all_are = self.malformed == self.rows
        remedy = "" if all_are else " (data.malformed=skip leaves them out)"
        return MalformedRowError(f"{self.malformed:,} of {self.rows:,} rows are no {kind}{remedy}: {self.named}")

    @property
    def note(self) -> str:
        """Sentence for the log about rows that were left out."""
        be = "is" if self.malformed == 1 else "are"
        return f"{self.malformed:,} of {many(self.rows, 'row')} {be} left out as malformed: {self.named}"


def _merge(complaints: list[str]) -> str:
    """Return complaints that differ in the row alone as one: `FILE, 3 lines (1, 4, 5): no field 'text'`."""
    if len(complaints) == 1:
        return complaints[0]
    numbers = ", ".join(match[2] for complaint in complaints if (match := _NUMBER.search(complaint)))
    return _NUMBER.sub(rf", {len(complaints)} \1s ({numbers})", complaints[0], count=1)


def sum_malformed(counts: Iterable[MalformedRows]) -> MalformedRows:
    """Add up the counts of several sources."""
    counts = list(counts)
    return MalformedRows(
        rows=sum(count.rows for count in counts),
        malformed=sum(count.malformed for count in counts),
        first=[complaint for count in counts for complaint in count.first][:_NAMED],
    )


def texts(records: Iterator[Row], field: str) -> Iterator[tuple[str, str | Malformed]]:
    """Yield (location, text) of one field of every row."""
    for where, row in records:
        try:
            yield where, row if isinstance(row, Malformed) else text_of(row, field, readable_location(where))
        except MalformedRowError as error:
            yield where, Malformed(str(error))


def readable_location(where: str) -> str:
    """Return a location in words: `FILE, line 3`."""
    path, _, number = where.rpartition(":")
    return f"{path}, {'line' if path.endswith('.jsonl') else 'row'} {number}"


def jsonl(path: Path) -> Iterator[Row]:
    """Yield every line except blank ones."""
    try:
        with path.open("rb") as file:
            check_begins_as_utf8(path, file.read(BEGINNING))
            file.seek(0)
            yield from json_lines(file, str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def json_lines(file: IO[bytes], name: str, end: int | None = None) -> Iterator[Row]:
    """Yield the lines from here to those that begin before position `end`, None = all, except blank ones."""
    for number in count(1):
        if end is not None and file.tell() >= end:
            return
        line, where = file.readline(MOST_CHARACTERS + 1), f"{name}, line {number}"
        if not line:
            return
        if len(line) > MOST_CHARACTERS:
            while line and not line.endswith(b"\n"):
                line = file.readline(MOST_CHARACTERS)
            complaint = f"{where} has more than {MOST_CHARACTERS:,} bytes: one row a line"
            yield f"{name}:{number}", Malformed(complaint)
        elif line.strip():
            yield f"{name}:{number}", _parse_line(line, where)


def json_array(path: Path) -> Iterator[Row]:
    """Yield every object of a .json array, streamed. Raises DataError for broken JSON, which hides later rows."""
    for number, row, complaint in objects(path):
        yield f"{path}:{number}", Malformed(f"{path}, row {number}: {complaint}") if complaint else row


def parquet(path: Path, columns: Sequence[str] | None = None, name: str = "") -> Iterator[Row]:
    """Yield every row, streamed, since a row group may exceed memory. Needs pyarrow.

    `columns` = only these. `name`: that of the file in locations and messages, by default its path.
    """
    name = name or str(path)
    require("parquet", name, error=DataError)
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            for column in columns or ():
                _require_field(column, file.schema_arrow.names, name)
            batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=columns and list(columns))
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{name}:{number}", _remove_padding(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name} is not a readable parquet file: {' '.join(str(error).split())}") from error


def hub(dataset: Any, name: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield (hub:NAME:ROW, fields) of every row of a loaded hub dataset. `columns` = only these."""
    for column in columns or ():
        _require_field(column, dataset.column_names, name)
    chosen = dataset.select_columns(list(columns)) if columns else dataset
    for number, row in enumerate(chosen, start=1):
        yield f"{name}:{number}", _remove_padding(row)


def require_hub(name: str) -> None:
    """Raise DataError unless the library that loads hub datasets is installed."""
    require("hf", f"data.path={name}", error=DataError)


def load_hub(name: str) -> Any:
    """Load the `train` split of `hub:NAME` or `hub:NAME:CONFIG` with the datasets library. Needs a network once."""
    require_hub(name)
    import datasets

    parts = name.removeprefix("hub:").split(":")
    try:
        return datasets.load_dataset(*parts, split="train")
    except Exception as error:  # the library raises whatever its transports raise
        raise DataError(f"data.path={name} cannot be loaded from the hub: {' '.join(str(error).split())}") from error


def _remove_padding(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row of a table without the null fields that its objects share with other rows."""
    return {name: _remove_nulls(value) for name, value in row.items()}


def _remove_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _remove_nulls(part) for name, part in value.items() if part is not None}
    return [_remove_nulls(part) for part in value] if isinstance(value, list) else value


def text_of(row: Mapping[str, Any], field: str, where: str) -> str:
    """Return one field as text. Raises MalformedRowError when it is missing or not text."""
    _require_field(field, list(row), where)
    text = row[field]
    if not isinstance(text, str):
        raise MalformedRowError(
            f"{where}: field {field!r} is {_kind(text)}, not text; set data.text_field or correct the row"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MalformedRowError(
            f"{where}: field {field!r} holds half a surrogate pair, which is not valid Unicode: remove it"
        ) from None
    return text


def _parse_line(line: bytes, where: str) -> Mapping[str, Any] | Malformed:
    try:
        row = json.loads(line.rstrip())
    except UnicodeDecodeError:
        return Malformed(f"{where}: {describe_non_utf8(line)}")
    except json.JSONDecodeError as error:
        return Malformed(f"{where}, column {error.colno}: broken JSON, {error.msg}")
    except (ValueError, RecursionError) as error:
        return Malformed(f"{where}: broken JSON, {error}")
    return row if isinstance(row, dict) else Malformed(f"{where}: a row is an object with fields, not {_kind(row)}")


def _require_field(field: str, present: list[str], where: str) -> None:
    if field not in present:
        has = ", ".join(map(str, present)) or "no fields"
        hint = "set data.text_field" if _OF_SAMPLES.isdisjoint(present) else "`meshwright tune` trains on such rows"
        raise MalformedRowError(f"{where}: no field {field!r}, it has: {has}; {hint}")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
