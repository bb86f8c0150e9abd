"""A JSON array of objects, read one object at a time: a file may be larger than memory."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn, final

from meshwright.data.encodings import BEGINNING, check_begins_as_utf8, not_utf8
from meshwright.spec.errors import DataError

_BLOCK: Final = 2**20
_NEAR: Final = 16
"""Characters before the end of a buffer in which a word, a number or an escape may have been cut."""
MOST_CHARACTERS: Final = 2**28
"""Of one row."""
_SPACES: Final = " \t\n\r"
_KINDS: Final[dict[str, str]] = {"{": "dict", "[": "list", '"': "str", "t": "bool", "f": "bool", "n": "null"}
_KINDS.update(dict.fromkeys("-0123456789", "a number"))
"""What a value is, by its first character."""
_UNDECODED: Final = re.compile("[\udc80-\udcff]")
"""Bytes that are no UTF-8, as `surrogateescape` has them."""


def objects(path: Path) -> Iterator[tuple[int, Any, str]]:
    """(number from 1, object, what is wrong with it or nothing) of every element, streamed: an element may be no object
    or no UTF-8. DataError names file, line and column of what is no JSON; a row larger than MOST_CHARACTERS is
    refused."""
    try:
        with path.open("rb") as file:
            check_begins_as_utf8(path, file.read(BEGINNING))
            file.seek(0)
            yield from _ArrayReader(path, iter(lambda: file.read(_BLOCK), b"")).objects()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


@final
class _ArrayReader:
    """Text of which only the part that is looked at is in memory."""

    def __init__(self, path: Path, blocks: Iterator[bytes]) -> None:
        self._path, self._blocks = path, blocks
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._undecoded = False
        self._buffer, self._place, self._ended = "", 0, False
        self._line, self._column = 1, 1
        """Of the beginning of the buffer."""

    def objects(self) -> Iterator[tuple[int, Any, str]]:
        if self._mark() != "[":
            raise DataError(
                f"{self._path} holds {self._kind()}, not an array of objects: give one object a line in a .jsonl file"
            )
        self._place += 1
        number = 0
        if self._mark() != "]":
            while True:
                number += 1
                yield number, *self._element(number)
                if self._mark() != ",":
                    break
                self._place += 1
        if self._mark() != "]":
            self._broken("Expecting ',' delimiter", self._place)
        self._place += 1
        if self._mark():
            self._broken("Extra data", self._place)

    def _element(self, number: int) -> tuple[Any, str]:
        kind = self._kind()
        complaint = "" if kind == "dict" else f"a row is an object with fields, not {kind}"
        while True:
            try:
                element, end = _DECODER.raw_decode(self._buffer, self._place)
                if complaint and end > len(self._buffer) - _NEAR and not self._ended:  # more digits may follow
                    self._read(_BLOCK)
                    continue
                row, self._place = self._buffer[self._place : end] if self._undecoded else "", end
                undecoded = _UNDECODED.search(row)
                return element, not_utf8(row.encode(errors="surrogateescape")) if undecoded else complaint
            except json.JSONDecodeError as error:
                if self._ended or not self._may_go_on(error):
                    self._broken(error.msg, error.pos)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{self._path}, row {number}: broken JSON, {error}") from None
            self._read(len(self._buffer) - self._place)
            if len(self._buffer) - self._place > MOST_CHARACTERS:
                raise DataError(f"{self._path}, row {number} has more than {MOST_CHARACTERS:,} characters")

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Whether the text is not wrong but cut by the end of the buffer."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - _NEAR

    def _mark(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self._place < len(self._buffer):
                if self._buffer[self._place] not in _SPACES:
                    return self._buffer[self._place]
                self._place += 1
            if self._ended:
                return ""
            self._read(_BLOCK)

    def _read(self, characters: int) -> None:
        """At least so many more, if there are; what was read before is let go."""
        self._line, self._column = self._at(self._place)
        parts, size = [self._buffer[self._place :]], 0
        self._place = 0
        while size < max(characters, _BLOCK) and not self._ended:
            block = next(self._blocks, b"")
            self._ended = not block
            parts.append(self._decode.decode(block, final=self._ended))
            self._undecoded = self._undecoded or not _is_utf8(parts[-1])
            size += len(parts[-1])
        self._buffer = "".join(parts)

    def _at(self, place: int) -> tuple[int, int]:
        """(line, column) of a place in the buffer."""
        lines = self._buffer.count("\n", 0, place)
        column = place - self._buffer.rfind("\n", 0, place) if lines else self._column + place
        return self._line + lines, column

    def _broken(self, why: str, place: int) -> NoReturn:
        line, column = self._at(place)
        if self._undecoded and _UNDECODED.match(self._buffer, place):
            why = "not UTF-8 text"
        raise DataError(f"{self._path}, line {line}, column {column}: broken JSON, {why}")

    def _kind(self) -> str:
        """What stands at the next mark."""
        kind = _KINDS.get(self._mark())
        return kind if kind else self._broken("Expecting value", self._place)


def _is_utf8(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


_DECODER: Final = json.JSONDecoder()
