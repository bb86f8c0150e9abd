"""Encodings of text other than UTF-8: detection, and the command that converts the file.

Byte order marks: The Unicode Standard, section 23.8. Windows PowerShell writes UTF-16 for `>`.
"""

import codecs
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


def not_utf8(text: bytes) -> str:
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
