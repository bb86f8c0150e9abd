"""Pieces: a text of any length as a stream of strings that can be encoded one by one.

A piece ends where the pre-tokenizers in use (GPT-2, Llama-3, Qwen, ours) end a word anyway, so encoding the pieces
gives the same tokens as encoding the whole.
"""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.data.text.encodings import check_begins_as_utf8, conversion, narrow_encoding
from meshwright.spec.errors import DataError

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
                buffer += _decoded(decode, block, path, offset)
                offset += len(block)
                *whole, buffer = cut(buffer) if len(buffer) > PIECE else (buffer,)
                yield from whole
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    buffer += _decoded(decode, b"", path, offset)
    yield from cut(buffer)


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, offset: int) -> str:
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
