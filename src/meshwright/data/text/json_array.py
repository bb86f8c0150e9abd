"""JSON arrays of objects, read one object at a time, since a file may be larger than memory."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn, final

from meshwright.data.text.encodings import BEGINNING, check_begins_as_utf8, not_utf8
from meshwright.spec.errors import DataError

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
        self._line, self._column = 1, 1  # of the beginning of the buffer

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
                return element, not_utf8(row.encode(errors="surrogateescape")) if undecoded else complaint
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
        self._line, self._column = self._at(self._position)
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
        return self._line + lines, column

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
