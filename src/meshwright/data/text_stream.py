"""Text while it is being made: tokens in, whole characters out."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

UNFINISHED = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character yet."""
LOOKBACK = 8
"""Tokens that are decoded again for context: what a token spells may depend on the one before it."""
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_TOKENWISE: Final = frozenset({"Fuse", "Metaspace", "Replace", "Strip"})
"""Decoders that read one token at a time, but for the begin of the text."""


@final
class TokenTexts(dict[int, "str | None"]):
    """Texts of tokens that spell the same behind any whole character; None for others. Filled as they are asked for.

    Shared by all streams of one tokenizer. Byte-level tokens have one if their bytes are whole characters, and pieces
    of SentencePiece if they are no bytes. With any other decoder no token has one."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], vocabulary: Mapping[str, int], decoder: Mapping[str, Any] | None
    ) -> None:
        """`vocabulary`: token -> id; `decoder`: as in tokenizer.json."""
        super().__init__()
        self._decode = decode
        steps = [decoder or {}] if not decoder or decoder.get("type") != "Sequence" else decoder["decoders"]
        kinds = {step.get("type") for step in steps}
        byte_level = kinds == {"ByteLevel"}
        known = byte_level or (kinds <= _TOKENWISE | {"ByteFallback"} and not any(step.get("stop") for step in steps))
        letters = (token for name, token in vocabulary.items() if len(name) == 1 and name.isascii() and name.isalpha())
        self._letter = next(letters, None) if known else None
        bytes_alone = vocabulary.items() if "ByteFallback" in kinds else ()
        self._bytes = frozenset(token for name, token in bytes_alone if _BYTE_TOKEN.fullmatch(name))

    def __missing__(self, token: int) -> "str | None":
        """Decode a token for the first time, behind a letter: at the begin of a text blanks may be left out."""
        text = None
        if self._letter is not None and token not in self._bytes:
            text = self._decode([self._letter, token])[1:]
        self[token] = text = None if text is None or UNFINISHED in text else text
        return text


@final
class TextStream:
    """Turns token ids, one at a time, into pieces of text that join to what decoding them all at once gives."""

    __slots__ = ("_decode", "_ids", "_last", "_shown", "_texts")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = (), texts: TokenTexts | None = None
    ) -> None:
        """`texts`: of the same tokenizer; a token that has one there costs a look-up in place of two decodings."""
        self._decode, self._texts = decode, texts
        self._ids = list(prompt_ids[-LOOKBACK:])
        self._shown = len(self._ids)
        self._last: int | None = None  # a token of `texts`, all that decoding the next one needs

    def push(self, token: int) -> str:
        """The text that became certain with this token; empty while a character is incomplete."""
        if self._texts is not None and self._shown == len(self._ids):
            text = self._texts[token]
            if text is not None:
                self._last = token
                return text
        if self._last is not None:
            self._ids, self._shown, self._last = [self._last], 1, None
        self._ids.append(token)
        piece = self._new()
        if piece.endswith(UNFINISHED):
            return ""
        self._ids = self._ids[-LOOKBACK:]
        self._shown = len(self._ids)
        return piece

    def rest(self) -> str:
        """What is left at the end, replacement characters included."""
        return "" if self._last is not None else self._new()

    def _new(self) -> str:
        before = self._decode(self._ids[: self._shown])
        return self._decode(self._ids)[len(before) :]
