"""Text of a growing sequence of tokens: tokens in, whole characters out."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

UNFINISHED = "\ufffd"
"""Character that a tokenizer writes for an incomplete character."""
LOOKBACK = 8
"""Tokens that are decoded again for context, since the spelling of a token may depend on the one before it."""
LONGEST_RUN = 64
"""Most tokens in a row that are parts of characters, for which a stream or the end of a prompt waits."""
MOST_BYTES = 4
"""Most bytes of a character in UTF-8."""
BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_TOKENWISE: Final = frozenset({"Fuse", "Metaspace", "Replace", "Strip"})
"""Decoders that read one token at a time, except at the beginning of a text."""


@final
class TokenTexts(dict[int, "str | None"]):
    """Texts of tokens that are the same behind any whole character. None = others. Filled on demand.

    All streams of one tokenizer share it. Byte-level tokens have one if their bytes are whole characters, and pieces
    of SentencePiece if they are not bytes. With any other decoder no token has one.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], vocabulary: Mapping[str, int], decoder: Mapping[str, Any] | None
    ) -> None:
        """Take the vocabulary (token -> id) and the decoder of tokenizer.json."""
        super().__init__()
        self._decode = decode
        steps = [decoder or {}] if not decoder or decoder.get("type") != "Sequence" else decoder["decoders"]
        kinds = {step.get("type") for step in steps}
        self.byte_level: Final = kinds == {"ByteLevel"}
        known = self.byte_level or (
            kinds <= _TOKENWISE | {"ByteFallback"} and not any(step.get("stop") for step in steps)
        )
        letters = (token for name, token in vocabulary.items() if len(name) == 1 and name.isascii() and name.isalpha())
        self.letter = next(letters, None) if known else None
        """A token of one letter. Behind it alone others spell as behind any whole character: at the begin of a text
        blanks may be left out. None = texts of tokens are not known."""
        bytes_alone = vocabulary.items() if "ByteFallback" in kinds else ()
        self._bytes = frozenset(token for name, token in bytes_alone if BYTE_TOKEN.fullmatch(name))

    def __missing__(self, token: int) -> "str | None":
        """Decode a token for the first time."""
        text = None if self.letter is None or token in self._bytes else self.spell(token)
        self[token] = text = None if text is None or UNFINISHED in text else text
        return text

    def spell(self, token: int) -> str:
        """Return the text of a token behind others, with the leading space of a SentencePiece. Bytes become U+FFFD."""
        return self._decode([token]) if self.letter is None else self._decode([self.letter, token])[1:]

    def context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the end of a prompt on which the following text depends: tokens that are not whole characters."""
        assert self.letter is not None
        begin = len(prompt_ids)
        while begin and len(prompt_ids) - begin < LONGEST_RUN and self[prompt_ids[begin - 1]] is None:
            begin -= 1
        for cut in range(begin, min(begin + MOST_BYTES, len(prompt_ids))):  # a run may be cut within a character
            ids = [self.letter, *prompt_ids[cut:]]
            if UNFINISHED not in self._decode(ids):
                return ids
        return [self.letter, *prompt_ids[begin:]]


@final
class TextStream:
    """Converter of token ids, one at a time, into pieces of text that join to the decoded whole."""

    __slots__ = ("_decode", "_ids", "_shown", "_texts")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = (), texts: TokenTexts | None = None
    ) -> None:
        """Begin behind a prompt. A token in `texts`, of the same tokenizer, costs a lookup instead of two decodings."""
        self._decode = decode
        self._texts = None if texts is None or texts.letter is None else texts
        self._ids = list(prompt_ids[-LOOKBACK:]) if self._texts is None else self._texts.context(prompt_ids)
        self._shown = len(self._ids)

    def push(self, token: int) -> str:
        """Return the text that is certain with this token. Empty while a character is incomplete."""
        texts = self._texts
        if texts is not None and self._shown == len(self._ids):
            text = texts[token]
            if text is not None:
                if self._shown > 1:
                    del self._ids[1:]
                    self._shown = 1
                return text
        self._ids.append(token)
        piece = self._new()
        if piece.endswith(UNFINISHED):
            return self._cut(piece) if len(self._ids) - self._shown > LONGEST_RUN else ""
        if texts is None:
            self._ids = self._ids[-LOOKBACK:]
        elif piece:
            del self._ids[1:]
        self._shown = len(self._ids)
        return piece

    def _cut(self, run: str) -> str:
        """Emit most of a run that is not text, so that a token costs the same however long the run becomes.

        The possible beginning of a character is retained: a cut within one would give two replacement characters.
        """
        ids, before = self._ids, self._decode(self._ids[: self._shown])
        piece, context, behind = "", ids, ids
        for count in range(MOST_BYTES - 1, 2 * MOST_BYTES):
            front, behind = ids[:-count], ids[-count:]
            context = front[-LOOKBACK:] if self._texts is None else front[:1]
            piece = self._decode(front)[len(before) :]
            if piece + self._decode([*context, *behind])[len(self._decode(context)) :] == run:
                break
        self._ids, self._shown = [*context, *behind], len(context)
        return piece

    def rest(self) -> str:
        """Return the text remaining at the end, replacement characters included."""
        return self._new() if self._shown < len(self._ids) else ""

    def _new(self) -> str:
        before = self._decode(self._ids[: self._shown])
        return self._decode(self._ids)[len(before) :]
