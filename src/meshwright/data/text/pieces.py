"""Pieces: a text of any length as a stream of strings that can be encoded one by one.

A piece ends where the pre-tokenizers in use (GPT-2, Llama-3, Qwen, ours) end a word anyway, so encoding the pieces
gives the same tokens as encoding the whole.

Text in another encoding than UTF-8 is refused, with the command that converts it. Byte order marks: The Unicode
Standard, section 23.8. Windows PowerShell writes UTF-16 for `>`.
"""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from meshwright.spec.errors import DataError

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


def conversion(encoding: str) -> str:
    """Return the conversion command, in words for a message."""
    return f"convert it (iconv -f {encoding} -t UTF-8)"


def check_begins_as_utf8(path: Path, start: bytes) -> None:
    """Raise DataError for a file in UTF-16 or UTF-32, of which no line could be read."""
    if encoding := wide_encoding(start):
        raise DataError(f"{path} seems to be {encoding}, not UTF-8 text: {conversion(encoding)}")


def describe_non_utf8(text: bytes) -> str:
    """Describe a row that is not UTF-8. A stray byte among UTF-8 letters does not reveal an encoding."""
    letters = text.decode(errors="ignore")
    if not letters.isascii():
        return "not UTF-8 text"
    encoding = narrow_encoding(text)
    return f"not UTF-8 text; it seems to be {encoding}: {conversion(encoding)}"


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
_NEAR = 2**12

_SAFE = (
    re.compile(r"[^\W_](?=\r?\n)"),
    re.compile(r"[^\W_](?= \S)"),
    re.compile(r"\S\n(?=\S)"),
)
"""Positions at which every known word pattern ends a word: behind a letter or digit before a line end or a single
space, and between a line end and text that follows at once."""


def border(text: str, limit: int) -> int:
    """Return the position to cut `text` at or before `limit` (0 < limit < len(text)), preferably a line end."""
    for start in (max(0, limit - _NEAR), 0):
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
                *whole, buffer = cut(buffer) if len(buffer) > PIECE else (buffer,)
                yield from whole
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    buffer += _decode(decode, b"", path, offset)
    yield from cut(buffer)


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, offset: int) -> str:
    """Decode the next block (`b""` = the file ends), read `offset` bytes into the file."""
    if not offset:
        check_begins_as_utf8(path, block)
    nul = block.find(0)
    if nul >= 0:
        raise DataError(f"{path} is binary, not text: NUL byte at {offset + nul}; leave it out of data.path")
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        position = offset - pending + error.start
        encoding = narrow_encoding(error.object[error.start : error.start + _NEAR])
        raise DataError(
            f"{path} is not UTF-8 text: byte {position} is 0x{error.object[error.start]:02x}; it seems to be "
            f"{encoding}: {conversion(encoding)} or leave it out of data.path"
        ) from error
